"""What a handler is: how one task family is initialised, run and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import StopReason, Task, Verdict
from hpcroll.evaluators.base import Artefacts, FreshSandbox
from hpcroll.harnesses.base import AgentSession, Harness
from hpcroll.sandboxes.base import Sandbox


class Handler(Protocol):
    """One task family. Constructed without I/O; one instance serves many rollouts.

    Every method may run again in a later attempt, in another sandbox, on another node.
    """

    Spec: ClassVar[type[Strict]]
    """Model of `Task.spec`."""

    def __init__(self, evaluation: EvaluationConfig) -> None: ...

    def resolve(self, task: Task, base: Path) -> Task:
        """The task as submitted: spec validated, paths absolute (relative to `base`) and present.

        Raises `ConfigError` that says which field is wrong.
        """
        ...

    async def init(self, task: Task, sandbox: Sandbox) -> None:
        """Prepares a started sandbox for the agent. Hidden tests never enter it."""
        ...

    async def run(self, task: Task, session: AgentSession, harness: Harness) -> StopReason:
        """Runs the agent to its end; stopped at the deadline by cancellation."""
        ...

    async def collect(self, task: Task, session: AgentSession) -> Artefacts:
        """What the agent left, also after a time-out; nothing of it is executed."""
        ...

    async def eval(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The verdict on the artefacts, reached in fresh sandboxes or none at all."""
        ...
