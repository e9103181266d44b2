"""Programming: a program that passes hidden unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hpcroll.config import Strict
from hpcroll.contract import Task
from hpcroll.errors import ConfigError, SandboxError
from hpcroll.evaluators.base import Artefacts, Evaluator
from hpcroll.evaluators.program import ProgramEvaluator, ProgramSpec
from hpcroll.evaluators.trees import is_inside
from hpcroll.handlers.base import AnswerHandler, answer_of, read_spec
from hpcroll.harnesses.base import AgentSession


class CodeHandler(AnswerHandler):
    """The agent leaves a program in a file of its work directory, or submits it as its answer."""

    Spec: ClassVar[type[Strict]] = ProgramSpec
    evaluator: ClassVar[type[Evaluator]] = ProgramEvaluator

    def resolve(self, task: Task, base: Path) -> Task:
        """The task with its spec validated; raises `ConfigError`."""
        spec = read_spec(ProgramSpec, task)
        if not is_inside(spec.solution_file):
            raise ConfigError(
                f"task {task.task_id}: spec: solution_file: {spec.solution_file!r} is not a relative path "
                "inside the work directory"
            )
        return task

    async def collect(self, task: Task, session: AgentSession) -> Artefacts:
        """`solution`, the content of the solution file where there is one; `answer` where submitted."""
        spec = ProgramSpec.model_validate(task.spec)
        artefacts = answer_of(session)
        path = f"{session.sandbox.workdir}/{spec.solution_file}"
        try:
            artefacts["solution"] = await session.sandbox.get(path, limit_bytes=spec.program_bytes)
        except FileNotFoundError:
            pass  # the answer is the program then
        except SandboxError:
            # A directory, a device or a huge file in that place is the agent's doing.
            if not await session.sandbox.alive():
                raise
        return artefacts
