"""Software engineering: a change to a repository, scored by hidden tests."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, cast

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import StopReason, Task, Verdict
from hpcroll.errors import ConfigError
from hpcroll.evaluators.base import Artefacts, Evaluator, FreshSandbox
from hpcroll.evaluators.repository import RepositorySpec, lay_out, read_patch
from hpcroll.evaluators.trees import is_inside, resolve_tree, tree_sha256
from hpcroll.handlers.base import answer_of, read_spec
from hpcroll.harnesses.base import AgentSession, Harness
from hpcroll.plugins.registry import Family, load
from hpcroll.sandboxes.base import Sandbox


class SweHandler:
    """The agent gets a git repository; what counts is its work tree, committed or not."""

    Spec: ClassVar[type[Strict]] = RepositorySpec

    def __init__(self, evaluation: EvaluationConfig) -> None:
        self._evaluation = evaluation
        self._evaluators: dict[str, Evaluator] = {}

    def resolve(self, task: Task, base: Path) -> Task:
        """The task with its archives found and their digests noted; raises `ConfigError`.

        An archive that no longer has the digest in the spec is refused: submit its task file anew.
        """
        where = f"task {task.task_id}: spec"
        spec = read_spec(RepositorySpec, task)
        load(Family.EVALUATOR, spec.evaluator)
        for path in spec.tests_paths:
            if not is_inside(path):
                raise ConfigError(f"{where}: tests_paths: {path!r} is not a relative path inside the tree")
        trees = {"repo": spec.repo, "tests": spec.tests}
        if spec.deps is not None:
            trees["deps"] = spec.deps
        found = {name: resolve_tree(tree, base, field=f"{where}: {name}") for name, tree in trees.items()}
        digests = {name: tree_sha256(tree) for name, tree in found.items()}
        for name, digest in spec.content_sha256.items():
            if digests.get(name) != digest:
                raise ConfigError(f"{where}: {name} has changed since content_sha256 was written")
        return task.model_copy(update={"spec": {**task.spec, **found, "content_sha256": digests}})

    async def init(self, task: Task, sandbox: Sandbox) -> None:
        """The repository in the work directory, with one commit; raises `ImageError` without git."""
        await lay_out(RepositorySpec.model_validate(task.spec), sandbox)

    async def run(self, task: Task, session: AgentSession, harness: Harness) -> StopReason:
        """Runs the agent to its end; stopped at the deadline by cancellation."""
        return await harness.run(session)

    async def collect(self, task: Task, session: AgentSession) -> Artefacts:
        """`patch`, or `patch_error`; `answer` where submitted."""
        patch = await read_patch(RepositorySpec.model_validate(task.spec), session.sandbox)
        return {**answer_of(session), **patch}

    async def eval(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The verdict of the task's evaluator."""
        name = RepositorySpec.model_validate(task.spec).evaluator
        if name not in self._evaluators:
            self._evaluators[name] = cast(Evaluator, load(Family.EVALUATOR, name)(self._evaluation))
        return await self._evaluators[name].evaluate(task, artefacts, fresh)
