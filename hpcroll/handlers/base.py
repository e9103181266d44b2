"""What a handler is: how one task family is initialised, run and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from pydantic import ValidationError

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.config.load import describe
from hpcroll.contract import StopReason, Task, Verdict
from hpcroll.errors import ConfigError
from hpcroll.evaluators.base import Artefacts, Evaluator, FreshSandbox
from hpcroll.harnesses.base import AgentSession, Harness
from hpcroll.sandboxes.base import Sandbox

SpecT = TypeVar("SpecT", bound=Strict)


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


class AnswerHandler:
    """A task that is answered in words: nothing to prepare, and the submitted answer is all that counts.

    The other families override `init` and `collect`, where the agent finds or leaves more.
    """

    Spec: ClassVar[type[Strict]]
    evaluator: ClassVar[type[Evaluator]]

    def __init__(self, evaluation: EvaluationConfig) -> None:
        self._evaluator = self.evaluator(evaluation)

    def resolve(self, task: Task, base: Path) -> Task:
        """The task with its spec validated; raises `ConfigError`."""
        read_spec(self.Spec, task)
        return task

    async def init(self, task: Task, sandbox: Sandbox) -> None:
        """Nothing: the prompt says it all."""

    async def run(self, task: Task, session: AgentSession, harness: Harness) -> StopReason:
        """Runs the agent to its end; stopped at the deadline by cancellation."""
        return await harness.run(session)

    async def collect(self, task: Task, session: AgentSession) -> Artefacts:
        """`answer`, where the agent submitted one."""
        return answer_of(session)

    async def eval(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The evaluator's verdict."""
        return await self._evaluator.evaluate(task, artefacts, fresh)


def answer_of(session: AgentSession) -> dict[str, bytes]:
    """The submitted answer as an artefact, nothing where there is none."""
    # A model may emit lone surrogates; they must not lose the rollout.
    return {} if session.answer is None else {"answer": session.answer.encode(errors="replace")}


def read_spec(model: type[SpecT], task: Task) -> SpecT:
    """`task.spec` as `model`; raises `ConfigError` that names the task and each wrong field."""
    try:
        return model.model_validate(task.spec)
    except ValidationError as error:
        raise ConfigError(f"task {task.task_id}: spec: {describe(error)}") from error
