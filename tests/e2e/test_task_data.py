"""Rows of public data sets: the reference answer earns 1, a wrong one 0, in a real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hpcroll.config import EvaluationConfig, SandboxConfig
from hpcroll.contract import Task
from hpcroll.evaluators.base import Artefacts, FreshSandbox
from hpcroll.evaluators.program import ProgramSpec, assemble
from hpcroll.plugins.registry import Family, load
from hpcroll.sandboxes.base import Sandbox, SandboxSpec
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.tasks import RowFormat, from_jsonl
from hpcroll.testing.oracle import oracle_actions, wrong_actions
from tests.capabilities import TASK_DATA, need

pytestmark = pytest.mark.timeout(1200)

ROWS = 40


def rows(row_format: RowFormat, count: int | None) -> list[Task]:
    need("task-data")
    return from_jsonl(TASK_DATA / f"{row_format}.jsonl", row_format)[:count]


def rewards(
    tasks: Sequence[Task], evaluator: str, artefacts: Callable[[Task], Artefacts], scratch: Path
) -> dict[float | None, list[str]]:
    """The ids of the tasks by their reward."""
    need("bwrap")
    provider = BwrapProvider(SandboxConfig(name="bwrap", scratch=scratch))

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        sandbox = await provider.start(SandboxSpec(name="rows", image=None))
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async def run(fresh: FreshSandbox) -> dict[float | None, list[str]]:
        judge = load(Family.EVALUATOR, evaluator)(EvaluationConfig())
        found: dict[float | None, list[str]] = {}
        for task in tasks:
            verdict = await judge.evaluate(task, artefacts(task), fresh)
            found.setdefault(verdict.reward, []).append(task.task_id)
        return found

    return asyncio.run(run(fresh))


def right_answer(task: Task) -> Artefacts:
    return {"answer": oracle_actions(task).answer.encode()}


def wrong_answer(task: Task) -> Artefacts:
    return {"answer": wrong_actions(task).answer.encode()}


def right_program(task: Task) -> Artefacts:
    spec = ProgramSpec.model_validate(task.spec)
    return {"solution": assemble(spec.prefix, str(spec.solution)).encode()}


def wrong_program(task: Task) -> Artefacts:
    return {"answer": b"    return None\n"}


def test_gsm8k_answers_are_scored_rightly(tmp_path: Path) -> None:
    tasks = rows(RowFormat.GSM8K, None)
    assert len(tasks) >= ROWS
    assert list(rewards(tasks, "math_verify", right_answer, tmp_path)) == [1.0]
    assert list(rewards(tasks, "math_verify", wrong_answer, tmp_path)) == [0.0]


def test_scibench_answers_are_scored_rightly(tmp_path: Path) -> None:
    tasks = rows(RowFormat.SCIBENCH, None)
    assert len(tasks) >= ROWS
    assert list(rewards(tasks, "quantity", right_answer, tmp_path)) == [1.0]
    assert list(rewards(tasks, "quantity", wrong_answer, tmp_path)) == [0.0]


def test_humaneval_programs_are_scored_rightly(tmp_path: Path) -> None:
    tasks = rows(RowFormat.HUMANEVAL, ROWS)
    assert len(tasks) == ROWS
    assert list(rewards(tasks, "program", right_program, tmp_path)) == [1.0]
    assert list(rewards(tasks, "program", wrong_program, tmp_path)) == [0.0]
