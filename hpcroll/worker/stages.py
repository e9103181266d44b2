"""What a worker does with one rollout in each stage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcroll.config import RunConfig
from hpcroll.contract import Stage, StopReason, Task, Verdict
from hpcroll.evaluators.base import Artefacts
from hpcroll.gateway import Gateway
from hpcroll.handlers.base import Handler
from hpcroll.harnesses.base import AgentSession, Harness, Installed
from hpcroll.plugins import Family, load
from hpcroll.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from hpcroll.worker.pools import Flight, StagePools

COLLECT_S = 120.0
"""Longest that collecting an agent's artefacts may take, on top of the run stage's deadline."""
MODEL_PORT = 8000
"""Port on 127.0.0.1 inside a sandbox at which an agent finds its model."""


@dataclass(slots=True)
class Ran:
    """What the run stage leaves."""

    stop_reason: StopReason
    artefacts: Artefacts = field(default_factory=dict)


class Stages:
    """Takes rollouts through init, run and eval, each in a slot of its pool."""

    def __init__(
        self,
        config: RunConfig,
        pools: StagePools,
        *,
        provider: SandboxProvider,
        harness: Harness,
        gateway: Gateway | None,
    ) -> None:
        self._config = config
        self._pools = pools
        self._provider = provider
        self._harness = harness
        self._gateway = gateway
        self._handlers: dict[str, Handler] = {}

    async def init_and_run(self, flight: Flight) -> Ran:
        """Initialises a sandbox and runs the agent in it; the sandbox is gone on return or raise."""
        task = flight.claim.rollout.task
        async with contextlib.AsyncExitStack() as stack:
            async with self._pools.slot(Stage.INIT, flight):
                sandbox = await self._provider.start(
                    SandboxSpec(
                        name=f"{flight.scratch_name}.run", image=task.image, binds=await self._mounts()
                    )
                )
                stack.push_async_callback(_stop, sandbox)
                await self._handler(task).init(task, sandbox)
            async with self._pools.slot(Stage.RUN, flight, extra_s=COLLECT_S):
                return await self._run(flight, sandbox)

    async def eval(self, flight: Flight, artefacts: Artefacts) -> Verdict:
        """The verdict on `artefacts`; one without a reward where the deadline came first."""
        task = flight.claim.rollout.task
        started = 0

        @contextlib.asynccontextmanager
        async def fresh() -> AsyncIterator[Sandbox]:
            nonlocal started
            started += 1
            name = f"{flight.scratch_name}.eval{started}"
            sandbox = await self._provider.start(SandboxSpec(name=name, image=task.image))
            try:
                yield sandbox
            finally:
                await _stop(sandbox)

        try:
            async with self._pools.slot(Stage.EVAL, flight):
                return await self._handler(task).eval(task, artefacts, fresh)
        except TimeoutError:
            # Deterministic for most tasks: trying again would only double the cost.
            timeout_s = self._config.stages.eval.timeout_s
            return Verdict(reward=None, no_reward_because=f"evaluation took longer than {timeout_s:g} s")

    async def _run(self, flight: Flight, sandbox: Sandbox) -> Ran:
        assert self._gateway is not None, "a leg with the run stage has a gateway"
        rollout = flight.claim.rollout
        handler = self._handler(rollout.task)
        model = self._gateway.open_session(
            rollout, flight.claim.attempt, max_calls=self._config.harness.max_turns
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(model.close)
            flight.model = model
            endpoint = model.outside
            # With the node's network, a port without a key would be open to everybody on the node.
            if self._harness.inside and not self._config.sandbox.network:
                endpoint = await model.serve_inside(await sandbox.listen(MODEL_PORT))
            flight.agent = AgentSession(
                prompt=rollout.task.prompt,
                sandbox=sandbox,
                endpoint=endpoint,
                rollout_id=rollout.rollout_id,
                model=model,
            )
            try:
                async with self._pools.deadline(Stage.RUN, self._config.stages.run.timeout_s):
                    stop_reason = await handler.run(rollout.task, flight.agent, self._harness)
            except TimeoutError:
                stop_reason = StopReason.TIME_LIMIT
        if stop_reason is StopReason.EXITED and model.error is not None:
            raise model.error  # a black-box agent that gave up on a model which did not answer
        # A limit that the gateway enforced is the reason, whatever the agent made of the refusal.
        stop_reason = model.limit or stop_reason
        return Ran(stop_reason, await handler.collect(rollout.task, flight.agent))

    async def _mounts(self) -> tuple[tuple[Path, str], ...]:
        if not isinstance(self._harness, Installed):
            return ()
        return tuple(await asyncio.to_thread(self._harness.mounts, self._config.sandbox.scratch))

    def _handler(self, task: Task) -> Handler:
        handler = self._handlers.get(task.handler)
        if handler is None:
            handler = load(Family.HANDLER, task.handler)(self._config.evaluation)
            self._handlers[task.handler] = handler
        return handler


async def _stop(sandbox: Sandbox) -> None:
    # Shielded: a rollout that is cancelled must still not leave its sandbox behind.
    await asyncio.shield(sandbox.stop())
