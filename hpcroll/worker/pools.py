"""The three stage pools of a worker: who is in which stage, for how long, and whether there is room.

Slots are granted in order of arrival. A stage's deadline begins with its slot, so that time in a queue
does not count against a rollout; that of the run stage stands still while the policy is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from hpcroll.config import StagesConfig
from hpcroll.contract import RolloutRef, Stage, StageTiming
from hpcroll.gateway import GatewaySession
from hpcroll.gateway.admission import Admission
from hpcroll.harnesses.base import AgentSession
from hpcroll.spool import Claim, EventLog

OVERDUE_GRACE_S = 60.0
"""Seconds past its deadline after which a rollout's worker counts as hung."""


@dataclass(slots=True, eq=False)
class Flight:
    """One claimed rollout on its way through the stages."""

    claim: Claim
    claimed_at: float = field(default_factory=time.time)
    stage: Stage | None = None
    """The stage whose slot it holds; None between two of them."""
    waiting_for: Stage | None = None
    scope: asyncio.Timeout | None = None
    """The deadline of the stage that it is in."""
    last_stage: Stage | None = None
    """The stage that it entered last."""
    ended: float | None = None
    """Monotonic time at which it left its last stage, well or not."""
    cancelled: bool = False
    """The operator no longer wants it."""
    released: bool = False
    """A drain ended its claim; nothing of it may become visible any more."""
    timings: dict[Stage, StageTiming] = field(default_factory=dict)
    committing: bool = False
    """True once its result may become visible: from here on it is not released any more."""
    agent: AgentSession | None = None
    """What the agent has done so far, also after the run stage was stopped from outside."""
    model: GatewaySession | None = None
    """The model calls so far, likewise."""

    @property
    def deadline(self) -> float | None:
        """Monotonic time at which the stage that it is in must be over; None where that stands still."""
        return self.scope.when() if self.scope is not None else None

    @property
    def ref(self) -> RolloutRef:
        return self.claim.rollout.ref

    @property
    def scratch_name(self) -> str:
        """Names what this attempt owns on the node; the attempt is the fencing token."""
        return f"{self.ref.segment}-{self.ref.ordinal}.a{self.claim.attempt}"


class StagePools:
    """Slots per stage, and the rule by which a worker claims."""

    def __init__(
        self,
        config: StagesConfig,
        stages: tuple[Stage, ...],
        events: EventLog,
        *,
        admission: Admission | None = None,
    ) -> None:
        self._config = config
        self._admission = admission or Admission()
        self._stages = stages
        self._events = events
        self._slots = {stage: asyncio.Semaphore(config.of(stage).width) for stage in stages}
        self.flights: set[Flight] = set()
        self._changed = asyncio.Event()

    def has_room(self) -> bool:
        """Whether one more claim could start at once and would not pile up later.

        Initialised sandboxes that wait for a run slot are bounded by `stages.ready`, finished runs that
        wait for evaluation by twice the width of that pool.
        """
        if not self._config.overlap:
            return all(flight.ended is not None for flight in self.flights)
        first = self._stages[0]
        entering = self._count(first) + self._count(None, waiting_for=first)
        if entering >= self._config.of(first).width:
            return False
        if Stage.EVAL in self._stages and first is not Stage.EVAL:
            backlog = self._count(None, waiting_for=Stage.EVAL)
            if backlog >= 2 * self._config.eval.width:
                return False
        if Stage.RUN not in self._stages:
            return True
        before_run = entering + self._count(None, waiting_for=Stage.RUN)
        free = self._config.run.width - self._count(Stage.RUN)
        return before_run < free + self._config.ready

    def counts(self) -> dict[Stage, int]:
        """Rollouts that hold a slot, by stage."""
        return {stage: self._count(stage) for stage in Stage}

    def overdue(self) -> list[Flight]:
        """Rollouts that are far past the deadline of their stage: their worker hangs."""
        limit = time.monotonic() - OVERDUE_GRACE_S
        return [flight for flight in self.flights if (flight.deadline or limit) < limit]

    def admit(self, flight: Flight) -> None:
        """Counts a claimed rollout from now on."""
        flight.waiting_for = self._stages[0]
        self.flights.add(flight)

    def dismiss(self, flight: Flight) -> None:
        """Counts it no longer."""
        self.flights.discard(flight)
        self._changed.set()

    def end_stages(self, flight: Flight) -> None:
        """Notes that a rollout is through its stages, well or not; it takes no room any more."""
        flight.ended = time.monotonic()
        flight.waiting_for = None
        self._changed.set()

    async def wait_changed(self, timeout_s: float) -> None:
        """Waits until `has_room` may have changed, at most `timeout_s`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def deadline(self, stage: Stage, timeout_s: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """`asyncio.timeout(timeout_s)`; in the run stage on a clock that stands still in a pause."""
        return self._admission.deadline(timeout_s) if stage is Stage.RUN else asyncio.timeout(timeout_s)

    @asynccontextmanager
    async def slot(self, stage: Stage, flight: Flight, *, extra_s: float = 0.0) -> AsyncIterator[None]:
        """Waits for a slot of `stage`; raises `TimeoutError` `extra_s` after the stage's deadline."""
        flight.waiting_for = stage
        async with self._slots[stage]:
            timeout_s = self._config.of(stage).timeout_s + extra_s
            begun, started_at = time.monotonic(), time.time()
            flight.waiting_for, flight.stage, flight.last_stage = None, stage, stage
            self._log(flight, f"{stage}.start")
            self._changed.set()
            try:
                async with self.deadline(stage, timeout_s) as flight.scope:
                    yield
            finally:
                flight.stage, flight.scope = None, None
                duration_s = time.monotonic() - begun
                flight.timings[stage] = StageTiming(started_at=started_at, duration_s=duration_s)
                self._log(flight, f"{stage}.end")
                self._changed.set()

    def _count(self, stage: Stage | None, *, waiting_for: Stage | None = None) -> int:
        return sum(f.stage is stage and f.waiting_for is waiting_for for f in self.flights)

    def _log(self, flight: Flight, event: str) -> None:
        self._events.write(event, rollout=str(flight.ref), attempt=flight.claim.attempt)
