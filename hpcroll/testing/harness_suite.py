"""The contract of harnesses as tests: subclass `HarnessContract` and give it your harness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from hpcroll.config import HarnessConfig, ModelConfig
from hpcroll.contract import Rollout, RolloutRef, StopReason, Task
from hpcroll.errors import ModelError, SandboxError, SpoolError
from hpcroll.gateway import Gateway, GatewaySession, Journal, read_journal
from hpcroll.harnesses.base import AgentSession, Harness
from hpcroll.testing.directory_sandbox import DirectorySandbox
from hpcroll.testing.policy_server import Behaviour, PolicyServer, Script, garbage, loops, solves, stalls

PROMPT = "Write the word ready into the file state, then submit 42."
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Stage:
    """All that a harness needs, running: a scripted model behind a gateway, and a directory."""

    server: PolicyServer
    journal: Journal
    model: GatewaySession
    sandbox: DirectorySandbox
    agent: AgentSession


class HarnessContract:
    """What the worker relies on, whatever the harness.

    The scripts use the tools of `react`; override them where your agent has others.
    """

    solving: ClassVar[Behaviour] = solves(["printf ready > state"], "42")
    looping: ClassVar[Behaviour] = loops("true")
    stalling: ClassVar[Behaviour] = stalls(3600.0)
    babbling: ClassVar[Behaviour] = garbage()
    config: ClassVar[HarnessConfig] = HarnessConfig()
    ends: ClassVar[StopReason] = StopReason.SUBMITTED
    """How an agent that has done its work stops; `EXITED` for a black box."""

    def make(self, config: HarnessConfig) -> Harness:
        """Your harness; construction must do no I/O."""
        raise NotImplementedError

    def test_agent_that_submits_leaves_its_answer_its_actions_and_its_work(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.solving) as there:
                reason = await self.make(self.config).run(there.agent)
                assert reason is self.ends
                assert there.agent.answer == "42"
                assert (tmp_path / "sandbox" / "state").read_text() == "ready"
                assert [action.exit_code for action in there.agent.actions[:1]] == [0]
                calls = range(len(there.model.calls))
                assert all(action.call_index in (None, *calls) for action in there.agent.actions)

        asyncio.run(run())

    def test_every_model_call_is_recorded_as_it_was_sampled(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.solving) as there:
                await self.make(self.config).run(there.agent)
                await there.model.close()
                recorded = [tuple(call.tokens.sampled_ids.tolist()) for call in there.model.calls]
                assert recorded == [sampled.sampled_ids for sampled in there.server.sampled]
                durable = list(read_journal(there.journal.path, rollout_id=there.model.rollout_id))
                assert [call.call for call in durable] == [call.call for call in there.model.calls]

        asyncio.run(run())

    def test_agent_that_never_ends_is_stopped_at_the_turn_limit(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.looping, max_calls=3) as there:
                config = self.config.model_copy(update={"max_turns": 3})
                assert await self.make(config).run(there.agent) is StopReason.TURN_LIMIT
                assert len(there.model.calls) == 3

        asyncio.run(run())

    def test_token_limit_of_the_gateway_is_the_stop_reason(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.looping, rollout_tokens=60) as there:
                assert await self.make(self.config).run(there.agent) is StopReason.TOKEN_LIMIT
                assert there.model.limit is StopReason.TOKEN_LIMIT

        asyncio.run(run())

    def test_garbage_from_the_model_is_not_an_error(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.babbling) as there:
                assert await self.make(self.config).run(there.agent) is self.ends

        asyncio.run(run())

    def test_inference_side_that_is_gone_is_a_model_error(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.looping) as there:
                await there.server.stop()
                with pytest.raises(ModelError):
                    await self.make(self.config).run(there.agent)

        asyncio.run(run())

    def test_reply_that_cannot_be_journalled_is_a_spool_error(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.looping) as there:
                await there.journal.close()
                with pytest.raises(SpoolError):
                    await self.make(self.config).run(there.agent)
                assert isinstance(there.model.error, SpoolError)

        asyncio.run(run())

    def test_sandbox_that_is_gone_is_a_sandbox_error(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.looping) as there:
                await there.sandbox.stop()
                with pytest.raises(SandboxError):
                    await self.make(self.config).run(there.agent)

        asyncio.run(run())

    def test_agent_stopped_in_mid_call_is_gone_and_its_call_is_recorded(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with stage(tmp_path, self.stalling) as there:
                agent = asyncio.ensure_future(self.make(self.config).run(there.agent))
                await until(lambda: there.server.waiting > 0)
                agent.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await agent
                await there.model.close()
                assert [call.call.error is None for call in there.model.calls] == [False]
                await until(lambda: there.server.waiting == 0)

        asyncio.run(run())


@asynccontextmanager
async def stage(
    root: Path,
    behaviour: Behaviour,
    *,
    max_calls: int | None = None,
    rollout_tokens: int = 1_000_000,
    remember: bool = False,
    noncanonical: float = 0.5,
) -> AsyncIterator[Stage]:
    """A scripted server that plays `behaviour` for `PROMPT`, a gateway session, and a directory."""
    (root / "sandbox").mkdir()
    sandbox = DirectorySandbox(root / "sandbox")
    scripts = [Script(prompt=PROMPT, behaviours=(behaviour,))]
    async with PolicyServer(scripts, remember=remember, noncanonical=noncanonical) as server:
        journal = Journal(root / "journal")
        journal.open()
        config = ModelConfig(endpoints=(server.base_url,), rollout_tokens=rollout_tokens, call_tries=2)
        gateway = Gateway(config, journal=journal)
        await gateway.start()
        try:
            model = gateway.open_session(_rollout(), 1, max_calls=max_calls)
            agent = AgentSession(PROMPT, sandbox, model.outside, model.rollout_id, model)
            yield Stage(server, journal, model, sandbox, agent)
        finally:
            await gateway.close()
            await journal.close()
            await sandbox.stop()


async def until(condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    """Returns once `condition()` holds; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is of another task or process
            await asyncio.sleep(0.005)


def _rollout() -> Rollout:
    task = Task(task_id="t", handler="command", prompt=PROMPT)
    return Rollout(ref=RolloutRef(segment="0" * 16, ordinal=0), task=task, sample_index=0, group_size=1)
