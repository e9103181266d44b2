"""The contract of evaluators as tests: subclass `EvaluatorContract` and give it your evaluator."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import ValidationError

from hpcroll.contract import Task, Verdict
from hpcroll.evaluators.base import Artefacts, Evaluator, FreshSandbox
from hpcroll.sandboxes.base import Sandbox
from hpcroll.testing.directory_sandbox import DirectorySandbox


@dataclass(frozen=True, slots=True)
class Case:
    """A task, artefacts that solve it, and artefacts that do not."""

    task: Task
    right: Artefacts
    wrong: Artefacts


class EvaluatorContract:
    """What handlers rely on, whatever the evaluator."""

    def make(self) -> Evaluator:
        """Your evaluator; construction must do no I/O."""
        raise NotImplementedError

    def cases(self) -> Sequence[Case]:
        """At least one task with artefacts of both kinds."""
        raise NotImplementedError

    @asynccontextmanager
    async def sandbox(self, root: Path) -> AsyncIterator[Sandbox]:
        """A started sandbox; `root` does not exist yet and is its own. A plain directory by default."""
        root.mkdir(parents=True)
        yield DirectorySandbox(root, name=root.name)

    def test_right_artefacts_earn_full_reward(self, tmp_path: Path) -> None:
        for case in self.cases():
            verdict = self.evaluate(case.task, case.right, tmp_path)
            assert verdict.reward == 1.0, (case.task.task_id, verdict)

    def test_wrong_artefacts_earn_nothing(self, tmp_path: Path) -> None:
        for case in self.cases():
            verdict = self.evaluate(case.task, case.wrong, tmp_path)
            assert verdict.reward == 0.0, (case.task.task_id, verdict)

    def test_no_artefacts_earn_nothing(self, tmp_path: Path) -> None:
        assert self.evaluate(self.cases()[0].task, {}, tmp_path).reward == 0.0

    def test_garbage_is_a_verdict_and_not_an_error(self, tmp_path: Path) -> None:
        case = self.cases()[0]
        noise = random.Random(7).randbytes(4096)
        verdict = self.evaluate(case.task, dict.fromkeys(case.right, noise), tmp_path)
        assert verdict.reward == 0.0, verdict

    def test_spec_refuses_unknown_fields(self) -> None:
        spec = {**self.cases()[0].task.spec, "no_such_field": 1}
        with pytest.raises(ValidationError, match="no_such_field"):
            self.make().Spec.model_validate(spec)

    def evaluate(self, task: Task, artefacts: Artefacts, root: Path) -> Verdict:
        """The verdict, reached in sandboxes below `root`."""
        return asyncio.run(self.make().evaluate(task, artefacts, self._fresh(root)))

    def _fresh(self, root: Path) -> FreshSandbox:
        @asynccontextmanager
        async def fresh() -> AsyncIterator[Sandbox]:
            async with self.sandbox(root / f"fresh-{os.urandom(4).hex()}") as sandbox:
                yield sandbox

        return fresh
