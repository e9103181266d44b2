"""The operator's wishes, as names: cancel, hold, drain, close.

    cancel/all  cancel/<segment>  cancel/<segment>.g<task index>  cancel/<segment>.<ordinal>
    hold/all    hold/<segment>    drain/all    drain/<incarnation>    closed

A wish is a file whose content says who made it and why. Wishes steer what is tried; they decide nothing.
"""

from __future__ import annotations

import getpass
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpcroll.contract import Rollout, RolloutRef, canonical_json
from hpcroll.fs import RunPaths, list_names, publish, read_fresh

ALL = "all"
CACHE_S = 1.0
"""How old an answer may be, in seconds."""


class Wishes:
    """Reads wishes, at most once a second each, and makes them. Thread-safe."""

    def __init__(self, paths: RunPaths, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: dict[Path, tuple[float, frozenset[str]]] = {}

    def is_cancelled(self, rollout: Rollout) -> bool:
        """Nobody wants this rollout any more."""
        return self.cancels(rollout.ref, rollout.group_size)

    def cancels(self, ref: RolloutRef, group_size: int) -> bool:
        """The same of rollout `ref`, in a segment with `group_size` samples of each task."""
        names = self._names(self._paths.cancel)
        return bool(names) and not names.isdisjoint(
            (ALL, ref.segment, f"{ref.segment}.g{ref.ordinal // group_size}", f"{ref.segment}.{ref.ordinal}")
        )

    def cancels_any_of(self, segment: str) -> bool:
        """Some rollout of `segment` is cancelled."""
        return any(
            name == ALL or name.partition(".")[0] == segment for name in self._names(self._paths.cancel)
        )

    def holds(self, segment: str) -> bool:
        """Nothing more of `segment` is to be started for now."""
        return not self._names(self._paths.hold).isdisjoint((ALL, segment))

    def draining(self, incarnation: str) -> bool:
        """That worker is to finish or release what it has, and to end."""
        return not self._names(self._paths.drain).isdisjoint((ALL, incarnation))

    @property
    def closed(self) -> bool:
        """The run takes no submissions and starts nothing more."""
        return self._cache(self._paths.closed, lambda: _present(self._paths.closed)) != frozenset()

    def cancel(self, *, segment: str = ALL, group: int | None = None, ordinal: int | None = None) -> None:
        """Cancels all of the run, or a segment, or of that a group (by task index) or one rollout."""
        if group is not None:
            segment = f"{segment}.g{group}"
        elif ordinal is not None:
            segment = f"{segment}.{ordinal}"
        self._make(self._paths.cancel / segment)

    def forget_cancelled(self, segment: str, group: int) -> None:
        """Takes away the wish of a group that is committed: every worker lists those that there are."""
        self._take_back(self._paths.cancel / f"{segment}.g{group}")

    def hold(self, segment: str = ALL) -> None:
        """Lets nothing more of `segment` start, until `resume`."""
        self._make(self._paths.hold / segment)

    def resume(self, segment: str = ALL) -> None:
        """Takes `hold` back."""
        self._take_back(self._paths.hold / segment)

    def drain(self, incarnation: str = ALL) -> None:
        """Tells one worker, or all of them, to end after what they have in flight."""
        self._make(self._paths.drain / incarnation)

    def undrain(self, incarnation: str = ALL) -> None:
        """Takes `drain` back, so that workers started later stay."""
        self._take_back(self._paths.drain / incarnation)

    def close(self) -> None:
        """Ends the run for good."""
        self._make(self._paths.closed)

    def _make(self, path: Path) -> None:
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        publish(path, canonical_json({"wished_at": time.time(), "wished_by": who}).encode())
        self._forget()

    def _take_back(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._cached.clear()

    def _names(self, directory: Path) -> frozenset[str]:
        return self._cache(directory, lambda: frozenset(list_names(directory)))

    def _cache(self, key: Path, look: Callable[[], frozenset[str]]) -> frozenset[str]:
        now_s = self._clock()
        with self._lock:
            cached = self._cached.get(key)
        if cached is not None and now_s - cached[0] < CACHE_S:
            return cached[1]
        found = look()
        with self._lock:
            self._cached[key] = (now_s, found)
        return found


def _present(path: Path) -> frozenset[str]:
    return frozenset() if read_fresh(path) is None else frozenset({path.name})
