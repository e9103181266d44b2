"""What a harness is: an agent program that only ever sees a task, a sandbox and a base URL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from hpcroll.config import HarnessConfig, Strict
from hpcroll.contract import Action, StopReason
from hpcroll.gateway import ModelEndpoint
from hpcroll.sandboxes.base import Sandbox

__all__ = ["AgentSession", "Harness", "ModelEndpoint"]


@dataclass(slots=True)
class AgentSession:
    """One run of an agent, and what it leaves: valid at any moment, also after a time-out.

    The harness appends to `actions` and sets `answer` as they happen, so that an agent which is stopped
    from outside keeps what it did.
    """

    prompt: str
    sandbox: Sandbox
    endpoint: ModelEndpoint
    """Reachable from where the harness runs: the node, or inside the sandbox."""
    rollout_id: str
    actions: list[Action] = field(default_factory=list)
    answer: str | None = None


class Harness(Protocol):
    """Runs an agent. Constructed from the config, without I/O; one instance serves many rollouts."""

    Options: ClassVar[type[Strict]]
    """Model of `harness.options`."""
    name: ClassVar[str]
    version: str
    inside: ClassVar[bool]
    """True where the agent runs inside the sandbox and needs the model endpoint there."""

    def __init__(self, config: HarnessConfig) -> None: ...

    async def run(self, session: AgentSession) -> StopReason:
        """Runs the agent to its end; the caller stops it at the deadline by cancellation.

        Raises `HarnessError` where the agent program is broken, `SandboxError` where the sandbox is
        gone, `ModelError` where the gateway gave up on the inference side.
        """
        ...
