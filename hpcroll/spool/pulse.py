"""A clock that runs only while its owner's own heartbeats are written in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pulse:
    """Counts the seconds in which this process could have seen others' heartbeats.

    A stalled file server stalls every heartbeat, the observer's too. Silence that is counted on this clock
    does not grow in a stall, so that no observer takes a stalled worker for a dead one. Thread-safe.
    """

    def __init__(self, beat_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._late_s = 2 * beat_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s: float | None = None
        self._good_s = 0.0

    def written(self) -> None:
        """Call after each heartbeat of ours is written."""
        now_s = self._clock()
        with self._lock:
            if self._last_s is not None and now_s - self._last_s <= self._late_s:
                self._good_s += now_s - self._last_s
            self._last_s = now_s

    @property
    def good_s(self) -> float:
        """Seconds up to our last heartbeat, over intervals whose heartbeats were in time."""
        with self._lock:
            return self._good_s

    def ahead_s(self) -> float:
        """`good_s` as it will be if the next heartbeat is in time: the latest that now can count as."""
        with self._lock:
            if self._last_s is None:
                return self._good_s
            return self._good_s + min(self._clock() - self._last_s, self._late_s)
