"""What a harness is: an agent program that only ever sees a task, a sandbox and a base URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from hpcroll.config import HarnessConfig, Strict
from hpcroll.contract import Action, StopReason
from hpcroll.errors import HpcrollError
from hpcroll.gateway import ModelEndpoint
from hpcroll.sandboxes.base import Sandbox

__all__ = ["AgentSession", "Harness", "Installed", "ModelEndpoint", "ModelWatch"]


class ModelWatch(Protocol):
    """What the gateway knows of a session: its calls, and why the latest got no reply."""

    @property
    def limit(self) -> StopReason | None:
        """The limit that refused it."""
        ...

    @property
    def error(self) -> HpcrollError | None:
        """`ModelError` or `SpoolError`."""
        ...

    @property
    def calls(self) -> Sequence[object]:
        """The calls so far."""
        ...


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
    model: ModelWatch | None = None
    """For harnesses that do not make the model calls themselves."""
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


@runtime_checkable
class Installed(Protocol):
    """A harness whose agent program does not come with the image; most harnesses are not."""

    def check(self) -> None:
        """Raises `ConfigError` where the program is not installed; called before workers are launched."""
        ...

    def mounts(self, scratch: Path) -> Sequence[tuple[Path, str]]:
        """Read-only binds that each sandbox of the agent needs: path on this node, path inside.

        Made ready on the node below `scratch` where they are not yet: the first call may take a minute.
        Raises `HarnessError`.
        """
        ...
