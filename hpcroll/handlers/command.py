"""Any job in any image, scored by any command that writes a reward."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hpcroll.config import Strict
from hpcroll.contract import Task
from hpcroll.evaluators.base import Artefacts, Evaluator
from hpcroll.evaluators.reward_file import CommandSpec, RewardFileEvaluator, pack_outputs, prepare
from hpcroll.evaluators.trees import resolve_tree
from hpcroll.handlers.base import AnswerHandler, answer_of, read_spec
from hpcroll.harnesses.base import AgentSession
from hpcroll.sandboxes.base import Sandbox


class CommandHandler(AnswerHandler):
    """The agent works on files; its outputs travel to a fresh sandbox, where the verifier looks at them."""

    Spec: ClassVar[type[Strict]] = CommandSpec
    evaluator: ClassVar[type[Evaluator]] = RewardFileEvaluator

    def resolve(self, task: Task, base: Path) -> Task:
        """The task with its archives found; raises `ConfigError`."""
        spec = read_spec(CommandSpec, task)
        found = {
            field: resolve_tree(tree, base, field=f"task {task.task_id}: spec: {field}")
            for field, tree in (("files", spec.files), ("verifier", spec.verifier))
            if tree is not None
        }
        return task.model_copy(update={"spec": {**task.spec, **found}})

    async def init(self, task: Task, sandbox: Sandbox) -> None:
        """The task's files in the work directory, and its set-up done."""
        await prepare(CommandSpec.model_validate(task.spec), sandbox)

    async def collect(self, task: Task, session: AgentSession) -> Artefacts:
        """`outputs`, packed, or `outputs_error`; `answer` where submitted."""
        outputs = await pack_outputs(CommandSpec.model_validate(task.spec), session.sandbox)
        return {**answer_of(session), **outputs}
