"""The demo's tasks, in real sandboxes: their own solutions earn 1, wrong work 0."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hpcroll.config import SandboxConfig
from hpcroll.contract import Task
from hpcroll.handlers.base import Handler
from hpcroll.plugins.registry import Family, load
from hpcroll.sandboxes.base import Sandbox, SandboxSpec
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.testing.demo import FAMILIES, demo_scripts, demo_tasks
from hpcroll.testing.handler_suite import HandlerContract, evaluation
from tests.capabilities import need


class InBwrap(HandlerContract):
    """Plays tasks of one family."""

    def __init__(self, family: str) -> None:
        self._handler: Handler = load(Family.HANDLER, family)(evaluation())

    def make(self) -> Handler:
        return self._handler

    def tasks(self) -> Sequence[Task]:
        return ()

    @asynccontextmanager
    async def sandbox(self, root: Path) -> AsyncIterator[Sandbox]:
        root.mkdir(parents=True)
        provider = BwrapProvider(SandboxConfig(name="bwrap", scratch=root))
        sandbox = await provider.start(SandboxSpec(name=root.name, image=None))
        try:
            yield sandbox
        finally:
            await sandbox.stop()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_demo_task_is_scored_rightly(family: str, tmp_path: Path) -> None:
    need("bwrap")
    there = InBwrap(family)
    for task in demo_tasks([family]):
        right = there.play(task, there.right(task), tmp_path / task.task_id / "right")
        assert right.reward == 1.0, (task.task_id, right)
        wrong = there.play(task, there.wrong(task), tmp_path / task.task_id / "wrong")
        assert wrong.reward == 0.0, (task.task_id, wrong)


def test_demo_scripts_solve_some_rollouts_of_every_task_and_fail_others() -> None:
    for script in demo_scripts():
        chosen = {script.choose(f"0123456789abcdef/{n}", 1).name for n in range(64)}
        assert chosen == {"solves", "fails"}, script.prompt
