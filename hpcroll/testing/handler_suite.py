"""The contract of handlers as tests: subclass `HandlerContract` and give it your handler and its tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from hpcroll.config import EvaluationConfig, HarnessConfig, Strict
from hpcroll.contract import StopReason, Task, Verdict
from hpcroll.errors import ConfigError
from hpcroll.evaluators.base import Artefacts, FreshSandbox
from hpcroll.handlers.base import Handler
from hpcroll.harnesses.base import AgentSession, ModelEndpoint
from hpcroll.sandboxes.base import Sandbox
from hpcroll.testing.directory_sandbox import DirectorySandbox
from hpcroll.testing.oracle import Actions, oracle_actions, wrong_actions

_NO_MODEL = ModelEndpoint(base_url="http://127.0.0.1:9/v1", api_key="", model="none")


class Player:
    """A harness that does what it is told, without a model."""

    Options: ClassVar[type[Strict]] = Strict
    name: ClassVar[str] = "player"
    version = "1"
    inside: ClassVar[bool] = False

    def __init__(self, config: HarnessConfig, actions: Actions) -> None:
        self._actions = actions

    async def run(self, session: AgentSession) -> StopReason:
        for command in self._actions.commands:
            await session.sandbox.exec(("sh", "-c", command), timeout_s=60)
        session.answer = self._actions.answer
        return StopReason.SUBMITTED


class HandlerContract:
    """What the worker relies on, whatever the task family."""

    def make(self) -> Handler:
        """Your handler; construction must do no I/O."""
        raise NotImplementedError

    def tasks(self) -> Sequence[Task]:
        """A few tasks; their paths are relative to `base`."""
        raise NotImplementedError

    def base(self) -> Path:
        """The directory that the tasks' paths are relative to."""
        return Path.cwd()

    def right(self, task: Task) -> Actions:
        """What earns reward 1."""
        return oracle_actions(task)

    def wrong(self, task: Task) -> Actions:
        """What earns reward 0."""
        return wrong_actions(task)

    def secrets(self, task: Task) -> Sequence[str]:
        """Text that must never be found in the agent's sandbox."""
        return ()

    @asynccontextmanager
    async def sandbox(self, root: Path) -> AsyncIterator[Sandbox]:
        """A started sandbox; `root` does not exist yet and is its own. A plain directory by default."""
        root.mkdir(parents=True)
        yield DirectorySandbox(root, name=root.name)

    def test_right_work_earns_full_reward(self, tmp_path: Path) -> None:
        for index, task in enumerate(self.tasks()):
            verdict = self.play(task, self.right(task), tmp_path / str(index))
            assert verdict.reward == 1.0, (task.task_id, verdict)

    def test_wrong_work_earns_nothing(self, tmp_path: Path) -> None:
        for index, task in enumerate(self.tasks()):
            verdict = self.play(task, self.wrong(task), tmp_path / str(index))
            assert verdict.reward == 0.0, (task.task_id, verdict)

    def test_agent_that_did_nothing_gets_a_verdict(self, tmp_path: Path) -> None:
        task = self.tasks()[0]
        assert self.play(task, Actions((), ""), tmp_path).reward == 0.0

    def test_agent_stopped_at_its_first_step_leaves_artefacts_and_a_verdict(self, tmp_path: Path) -> None:
        async def run() -> Verdict:
            handler, task = self.make(), self._resolved(self.tasks()[0])
            async with self.sandbox(tmp_path / "agent") as sandbox:
                await handler.init(task, sandbox)
                session = _session(task, sandbox)
                endless = Player(HarnessConfig(), Actions(("touch begun; exec sleep 600",), "never"))
                running = asyncio.ensure_future(handler.run(task, session, endless))
                await _begun(sandbox)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                artefacts = await handler.collect(task, session)
            return await handler.eval(task, artefacts, self._fresh(tmp_path))

        assert asyncio.run(run()).reward == 0.0

    def test_artefacts_are_the_same_when_collected_twice(self, tmp_path: Path) -> None:
        async def run() -> tuple[Artefacts, Artefacts]:
            handler, task = self.make(), self._resolved(self.tasks()[0])
            async with self.sandbox(tmp_path / "agent") as sandbox:
                session = await self._played(handler, task, self.right(task), sandbox)
                return await handler.collect(task, session), await handler.collect(task, session)

        first, second = asyncio.run(run())
        assert first.keys() == second.keys()
        assert all(isinstance(value, bytes) for value in first.values())

    def test_second_evaluation_says_the_same(self, tmp_path: Path) -> None:
        async def run() -> list[float | None]:
            handler, task = self.make(), self._resolved(self.tasks()[0])
            async with self.sandbox(tmp_path / "agent") as sandbox:
                session = await self._played(handler, task, self.right(task), sandbox)
                artefacts = await handler.collect(task, session)
            fresh = self._fresh(tmp_path)
            return [(await handler.eval(task, artefacts, fresh)).reward for _ in range(2)]

        assert asyncio.run(run()) == [1.0, 1.0]

    def test_secrets_never_enter_the_agents_sandbox(self, tmp_path: Path) -> None:
        async def run(task: Task, root: Path) -> bytes:
            handler = self.make()
            async with self.sandbox(root) as sandbox:
                await handler.init(task, sandbox)
                session = _session(task, sandbox)
                await handler.collect(task, session)
                everything = ("sh", "-c", "find . -type f -exec cat {} +; env")
                result = await sandbox.exec(everything, timeout_s=60, output_bytes=64 << 20)
                return result.stdout

        for index, task in enumerate(self.tasks()):
            seen = asyncio.run(run(self._resolved(task), tmp_path / str(index)))
            for secret in self.secrets(task):
                assert secret.encode() not in seen, (task.task_id, secret)

    def test_resolving_a_resolved_task_changes_nothing(self) -> None:
        handler = self.make()
        for task in self.tasks():
            resolved = self._resolved(task)
            assert handler.resolve(resolved, Path("/nowhere")) == resolved

    def test_unknown_field_of_a_spec_is_refused_by_task_and_name(self) -> None:
        task = self.tasks()[0]
        broken = task.model_copy(update={"spec": {**task.spec, "no_such_field": 1}})
        with pytest.raises(ConfigError, match="no_such_field") as caught:
            self.make().resolve(broken, self.base())
        assert task.task_id in str(caught.value)

    def play(self, task: Task, actions: Actions, root: Path) -> Verdict:
        """The verdict on an agent that does `actions`, its sandbox being gone before the evaluation."""

        async def run() -> Verdict:
            handler, resolved = self.make(), self._resolved(task)
            async with self.sandbox(root / "agent") as sandbox:
                session = await self._played(handler, resolved, actions, sandbox)
                artefacts = await handler.collect(resolved, session)
            return await handler.eval(resolved, artefacts, self._fresh(root))

        return asyncio.run(run())

    async def _played(self, handler: Handler, task: Task, actions: Actions, sandbox: Sandbox) -> AgentSession:
        await handler.init(task, sandbox)
        session = _session(task, sandbox)
        reason = await handler.run(task, session, Player(HarnessConfig(), actions))
        assert reason is StopReason.SUBMITTED
        return session

    def _resolved(self, task: Task) -> Task:
        return self.make().resolve(task, self.base())

    def _fresh(self, root: Path) -> FreshSandbox:
        @asynccontextmanager
        async def fresh() -> AsyncIterator[Sandbox]:
            async with self.sandbox(root / f"fresh-{os.urandom(4).hex()}") as sandbox:
                yield sandbox

        return fresh


def evaluation() -> EvaluationConfig:
    """The config that the suites construct handlers and evaluators with."""
    return EvaluationConfig()


async def _begun(sandbox: Sandbox) -> None:
    async with asyncio.timeout(60):
        while (await sandbox.exec(("test", "-e", "begun"), timeout_s=60)).exit_code != 0:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.01)


def _session(task: Task, sandbox: Sandbox) -> AgentSession:
    return AgentSession(
        prompt=task.prompt, sandbox=sandbox, endpoint=_NO_MODEL, rollout_id="0123456789abcdef/0"
    )
