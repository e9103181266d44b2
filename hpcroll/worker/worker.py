"""The worker: claims rollouts, flies them through its stages, commits, and stops without losing any."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from hpcroll.contract import EndReason, Failure, FailureClass, Status, StopReason, Trajectory
from hpcroll.errors import HpcrollError, SpoolError
from hpcroll.shards import adopt
from hpcroll.spool import BeatCounts, Claim, Claims, EventLog, Heartbeat, Incarnation, Spool
from hpcroll.worker.committer import Committer
from hpcroll.worker.drain import Drain
from hpcroll.worker.failures import describe
from hpcroll.worker.flights import Conductor, Result
from hpcroll.worker.idleness import idleness
from hpcroll.worker.pools import Flight, StagePools

log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.5
_WISH_POLL_S = 1.0
_TROUBLE_S = 5.0
"""Wait after a claim that the file system refused."""


class Worker:
    """One process's share of a run: a claim loop, and one task per rollout in flight."""

    def __init__(
        self,
        spool: Spool,
        incarnation: Incarnation,
        *,
        claims: Claims,
        pools: StagePools,
        conductor: Conductor,
        committer: Committer,
        heartbeat: Heartbeat,
        events: EventLog,
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        """`more`: tells whether further groups will be submitted, when there is nothing to do."""
        self._spool = spool
        self._incarnation = incarnation
        self._claims = claims
        self._pools = pools
        self._conductor = conductor
        self._committer = committer
        self._heartbeat = heartbeat
        self._events = events
        self._more = more
        self._drain = Drain(spool.config.stages.drain_grace_s)
        self._tasks: dict[asyncio.Task[None], Flight] = {}
        self._adopted: set[str] = set()
        self._adoptions: set[asyncio.Task[int]] = set()
        self._statuses: Counter[Status] = Counter()
        self._failures: Counter[FailureClass] = Counter()
        self._last_failure = ""
        self.broken = False
        """True where only a new incarnation may go on: a record was written and could not be committed."""

    async def run(self) -> None:
        """Works until nothing is left for this leg, or until a drain is done."""
        self._drain.listen()
        async with contextlib.AsyncExitStack() as stack:
            for service in (
                self._committer.run(),
                self._release(),
                self._repeat(self._beat, self._spool.config.lease.beat_s),
                self._repeat(self._see_to_wishes, _WISH_POLL_S),
            ):
                task = asyncio.create_task(service)
                task.add_done_callback(self._service_ended)
                stack.push_async_callback(_end, task)
            await self._claim()
            while self._tasks:
                await asyncio.wait(self._tasks)
            with contextlib.suppress(OSError, SpoolError):  # the last beat is for `status` alone
                await self._beat()
        self._events.write("worker.end", reason=self._drain.reason or "nothing left")

    async def _claim(self) -> None:
        """Claims what fits, until a drain is asked for or there has been nothing to do for long enough."""
        idle, idle_since = None, 0.0
        while not self._drain.asked:
            if not self._pools.has_room():
                await self._pools.wait_changed(_IDLE_POLL_S)
                continue
            claim = await self._next_claim()
            if claim is not None:
                idle = None
                if self._drain.asked:
                    await asyncio.to_thread(claim.release)
                else:
                    self._take_off(claim)
                continue
            if not self._tasks and self._claims.needs_successor:
                self._renew("rollouts are left that only a new incarnation may claim")
            now_idle = None
            if not self._tasks:
                more = not self._spool.wishes.closed and await asyncio.to_thread(self._more)
                now_idle = idleness(self._claims, self._spool.config.launch, more=more)
            if now_idle != idle:
                idle, idle_since = now_idle, time.monotonic()
                if idle is not None and idle.because is not None:
                    self._events.write("window.wait")
            if idle is not None and time.monotonic() - idle_since >= idle.patience_s:
                if idle.because is not None:
                    self._drain.ask(idle.because, grace=False)
                return
            await self._drain.wait_asked(_IDLE_POLL_S)

    async def _next_claim(self) -> Claim | None:
        try:
            return await asyncio.to_thread(self._claims.next)
        except (OSError, SpoolError) as error:
            log.warning("nothing claimed: %s", error)
            await self._drain.wait_asked(_TROUBLE_S)
            return None

    def _renew(self, reason: str) -> None:
        """Ends this incarnation, so that the rank's parent starts the next one."""
        self.broken = True
        self._drain.ask(reason, grace=False)

    def _take_off(self, claim: Claim) -> None:
        flight = Flight(claim)
        self._pools.admit(flight)
        self._events.write("claimed", rollout=str(flight.ref), attempt=claim.attempt)
        if claim.failures and claim.failures[-1].reason is EndReason.KILL:
            self._index_shards_of(claim.failures[-1].incarnation)
        task = asyncio.create_task(self._fly(flight), name=flight.scratch_name)
        self._tasks[task] = flight
        task.add_done_callback(self._landed)

    def _index_shards_of(self, dead: str) -> None:
        """Adopts, once, what a dead worker committed and did not mark; readers then find it fast."""
        if dead in self._adopted:
            return
        self._adopted.add(dead)
        task = asyncio.create_task(asyncio.to_thread(adopt, self._spool.paths, dead))
        self._adoptions.add(task)
        task.add_done_callback(self._adoption_ended)

    def _adoption_ended(self, task: asyncio.Task[int]) -> None:
        self._adoptions.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Only an index: readers find an unmarked record by scanning.
            log.warning("a dead worker's shards were not indexed: %s", task.exception())

    def _landed(self, task: asyncio.Task[None]) -> None:
        flight = self._tasks.pop(task)
        self._pools.dismiss(flight)
        error = None if task.cancelled() else task.exception()
        if error is not None or (task.cancelled() and not flight.released):
            log.error("rollout %s: its end was not written", flight.ref, exc_info=error)
            # Nobody takes a rollout over from a worker that lives: end this incarnation, then they do.
            self._renew(f"rollout {flight.ref}: its end was not written")

    async def _fly(self, flight: Flight) -> None:
        """Brings one rollout to its end: committed, failed, released, or lost to another attempt."""
        try:
            result = await self._conductor.conduct(flight)
        except asyncio.CancelledError:
            if not flight.cancelled:
                raise  # released by `_release`, which ended the claim before it cancelled this task
            # The cancellation is dealt with; one left pending would turn the next time-out into another.
            _this_task().uncancel()
            result = self._conductor.abandon(flight, Status.CANCELLED, StopReason.CANCELLED)
        except Exception as error:  # noqa: BLE001 - the worker loop: a failed attempt is data
            await self._fail(flight, error)
            return
        if await self._believed(flight):
            await self._commit(flight, result)

    async def _commit(self, flight: Flight, result: Result) -> None:
        ref, attempt = str(flight.ref), flight.claim.attempt
        try:
            if not await asyncio.to_thread(flight.claim.still_mine):
                self._events.write("lost", rollout=ref, attempt=attempt)
                return
            won = await self._conductor.commit(flight, result, self._committer)
        except (OSError, HpcrollError) as error:
            self._renew(f"commit failed: {error}")
            await self._end_attempt(flight, error)
            return
        status = result.record.status if isinstance(result, Trajectory) else None
        self._events.write("committed" if won else "lost", rollout=ref, attempt=attempt, status=status)
        if won and status is not None:
            self._statuses[status] += 1

    async def _fail(self, flight: Flight, error: Exception) -> None:
        if await self._believed(flight):
            await self._end_attempt(flight, error)

    async def _believed(self, flight: Flight) -> bool:
        """Whether an ending may become visible: True commits the flight to it, False released it.

        Payloads and sandboxes die of a step-wide signal too: that is a planned stop and says nothing
        of the rollout.
        """
        self._pools.end_stages(flight)
        if await self._drain.settle(time.monotonic()) and not flight.released:
            flight.committing = True
            return True
        if not flight.released:
            await asyncio.to_thread(flight.claim.release)
        return False

    async def _end_attempt(self, flight: Flight, error: Exception) -> None:
        failure = self._failure(flight, error)
        log.warning("rollout %s attempt %d: %s: %s", flight.ref, failure.attempt, failure.error, error)
        self._last_failure = f"{flight.ref}: {failure.error}: {failure.message}"
        self._failures[FailureClass(failure.reason.value)] += 1
        await asyncio.to_thread(flight.claim.fail, failure)
        self._events.write("failed", rollout=str(flight.ref), **failure.model_dump(mode="json"))

    def _failure(self, flight: Flight, error: Exception) -> Failure:
        return describe(
            error,
            attempt=flight.claim.attempt,
            stage=flight.last_stage,
            node=self._incarnation.host,
            incarnation=self._incarnation.id,
        )

    async def _release(self) -> None:
        """Once a drain is due: first ends every claim as `released`, then stops what they run."""
        await self._drain.wait_due()
        flights = [flight for flight in self._tasks.values() if not flight.committing]
        for flight in flights:
            flight.released = True
        await asyncio.to_thread(lambda: [flight.claim.release() for flight in flights])
        for flight in flights:
            self._events.write("released", rollout=str(flight.ref), attempt=flight.claim.attempt)
        for task, flight in list(self._tasks.items()):
            if flight.released:
                task.cancel()

    async def _repeat(self, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            try:
                await step()
            except (OSError, SpoolError) as error:
                # A file server in trouble comes back; a worker that stopped beating would lose its work.
                log.warning("%s: %s", step.__name__, error)
            await asyncio.sleep(every_s)

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("a service of this worker failed", exc_info=task.exception())
            self._renew(f"a service of this worker failed: {task.exception()}")

    async def _see_to_wishes(self) -> None:
        """Sees to the operator's wishes: a drain, and rollouts that nobody wants any more."""
        if await asyncio.to_thread(self._spool.wishes.draining, self._incarnation.id):
            self._drain.ask("asked by the operator")
        for task, flight in list(self._tasks.items()):
            # One that has left its stages ends by itself, and one that is released has ended.
            at_work = flight.ended is None and not (flight.released or flight.cancelled)
            if at_work and self._spool.wishes.is_cancelled(flight.claim.rollout):
                flight.cancelled = True
                task.cancel()

    async def _beat(self) -> None:
        """Beats, unless a rollout is far past its deadline: a hung worker must not look alive."""
        overdue = self._pools.overdue()
        if overdue:
            self._events.write("hung", rollouts=[str(flight.ref) for flight in overdue])
            return
        counts = BeatCounts(
            stages=self._pools.counts(),
            statuses=dict(self._statuses),
            failures=dict(self._failures),
            last_failure=self._last_failure,
        )
        await asyncio.to_thread(self._heartbeat.beat, counts)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine of a task"
    return task


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
