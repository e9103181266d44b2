"""Admission of model calls: they wait while the policy is paused, and are cut where a pause says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hpcroll.policy import AdmissionState, Pause, PauseMode


class CallCutError(Exception):
    """A call under way was cut by a pause: nothing is wrong with it, send it again."""


@dataclass(frozen=True, slots=True)
class _Seen:
    pause: Pause
    seen_at: float


class Admission:
    """The gate before the inference servers, in one event loop.

    Every time that is counted begins when this gate is told of a pause, on the loop's own clock. Outside of
    a pause it costs nothing: `call` awaits nothing then.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._calls: set[asyncio.Timeout] = set()
        self._deadlines: dict[asyncio.Timeout, float] = {}
        """Deadlines that stand still while the gate is closed: the seconds that each has left then."""
        self._scopes: set[asyncio.Timeout] = set()
        self._seen: dict[str, _Seen] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.generation = 0
        """The newest state of admission that this gate acts on."""

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    @property
    def in_flight(self) -> int:
        """Calls that were admitted and have not ended."""
        return len(self._calls)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[float]:
        """One try of a call: waits until it is admitted; gives the seconds that it waited.

        Put the call's own time-out inside, so that waiting does not count, and everything that reaches an
        inference server. Raises `CallCutError` out of the block where a pause cut it: it may be sent again
        if nothing of the reply was shown.
        """
        waited_s = await self._admitted()
        try:
            async with asyncio.timeout(None) as scope:
                self._calls.add(scope)
                try:
                    yield waited_s
                finally:
                    self._calls.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise  # the call's own time-out
            raise CallCutError("cut by a pause of the policy, for new weights") from error

    @asynccontextmanager
    async def deadline(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Like `asyncio.timeout(timeout_s)`, on a clock that stands still while the gate is closed."""
        async with asyncio.timeout(timeout_s) as scope:
            self._scopes.add(scope)
            if not self.is_open:
                self._stop(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)
                self._deadlines.pop(scope, None)

    def apply(self, state: AdmissionState) -> None:
        """Acts on the pauses in force: when it returns, no call is admitted against them."""
        self.generation = state.generation
        now = asyncio.get_running_loop().time()
        before = self._seen
        self._seen = {}
        for pause in state.pauses:
            seen = before.get(pause.name)
            renewed = seen is None or seen.pause.serial != pause.serial
            self._seen[pause.name] = _Seen(pause, now) if renewed or seen is None else seen
        self._settle()

    def expired(self) -> list[Pause]:
        """Pauses whose time is over, though nobody lifted them."""
        now = asyncio.get_running_loop().time()
        return [seen.pause for seen in self._seen.values() if _end(seen) <= now]

    async def _admitted(self) -> float:
        if self.is_open:
            return 0.0
        clock = asyncio.get_running_loop().time
        began = clock()
        while not self.is_open:  # it may have closed again before this task ran
            await self._open.wait()
        return clock() - began

    def _settle(self) -> None:
        """Opens or closes, cuts what is due, and comes back when the next thing is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        active = [seen for seen in self._seen.values() if _end(seen) > now]
        if active:
            self._close()
        else:
            self._reopen()
        cuts = [seen.seen_at + seen.pause.drain_s for seen in active if seen.pause.mode is PauseMode.CUT]
        if cuts and min(cuts) <= now:
            for scope in self._calls:
                if not scope.expired():
                    scope.reschedule(now)
        due = [*(_end(seen) for seen in active), *(at for at in cuts if at > now)]
        if due:
            self._timer = loop.call_at(min(due), self._settle)

    def _close(self) -> None:
        if self.is_open:
            self._open.clear()
            for scope in self._scopes:
                self._stop(scope)

    def _reopen(self) -> None:
        if not self.is_open:
            now = asyncio.get_running_loop().time()
            for scope, left_s in self._deadlines.items():
                scope.reschedule(now + left_s)
            self._deadlines.clear()
            self._open.set()

    def _stop(self, scope: asyncio.Timeout) -> None:
        when = scope.when()
        if when is not None and not scope.expired():
            self._deadlines[scope] = when - asyncio.get_running_loop().time()
            scope.reschedule(None)


def _end(seen: _Seen) -> float:
    return seen.seen_at + seen.pause.max_s
