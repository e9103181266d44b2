"""The stream of committed trajectories over all shards of a run, from a position that can be saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcroll.errors import ConfigError
from hpcroll.fs.atomic import read_fresh
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.shard_file import is_finished, list_shards
from hpcroll.shards.level0.walk import ShardWalk
from hpcroll.shards.reading.store import Store

_SLOWEST_POLLS = 8
"""A quiet shard is looked at this many poll intervals apart, at most."""
_SETTLE_S = 10.0
"""Seconds between two questions whether a quiet shard's owner is gone."""


@dataclass(frozen=True, slots=True)
class Following:
    """How to wait for more: look every `poll_s` seconds until `stop` says so or the run is closed."""

    poll_s: float
    stop: Callable[[], bool]


@dataclass(slots=True)
class _Rhythm:
    """When a shard is looked at next, on this process's monotonic clock."""

    pause_s: float = 0.0
    due_at: float = 0.0
    settle_at: float = 0.0


class Feed:
    """Hands out committed records in cursor order: shard by shard, in the order they were appended.

    Each is handed out once, over any number of `state` and `load` round trips. Memory grows with shards,
    never with records.
    """

    def __init__(
        self,
        store: Store,
        leg: str,
        *,
        columns: frozenset[Column],
        trust_marks: bool,
        following: Following | None,
    ) -> None:
        self.counts = store.counts
        self.ended: str | None = None
        """Why the stream ended: `closed`, the run is; `stopped`, the follower was; None while it goes on."""
        self._paths = store.paths
        self._leg = leg
        self._columns = columns
        self._trust_marks = trust_marks
        self._following = following
        self._walks: dict[ShardName, ShardWalk] = {}
        self._rhythms: dict[ShardName, _Rhythm] = {}

    def __iter__(self) -> Iterator[StoredTrajectory]:
        if self._following is None:
            for name in list_shards(self._paths):
                yield from self._walk(name).advance()
            self.ended = "closed"
        else:
            yield from self._follow(self._following)

    def state(self) -> dict[str, Any]:
        """The position, as JSON: per shard the bytes passed and the offsets that may still be committed."""
        return {str(name): [walk.seen, list(walk.pending)] for name, walk in self._walks.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position that `state` gave."""
        for text, (seen, pending) in state.items():
            name = ShardName.parse(text)
            if name is None:
                raise ConfigError(f"reader state names {text!r}, which is no shard")
            walk = self._walk(name)
            walk.seen, walk.pending, walk.settled = int(seen), [int(offset) for offset in pending], False

    def _walk(self, name: ShardName) -> ShardWalk:
        if name not in self._walks:
            self._walks[name] = ShardWalk(
                self._paths, name, self._leg, self._columns, self._trust_marks, self.counts
            )
        return self._walks[name]

    def _follow(self, following: Following) -> Iterator[StoredTrajectory]:
        self.ended = None
        while True:
            # Asked before the shards are: whatever was committed before then is still delivered.
            closed = read_fresh(self._paths.closed) is not None
            ending = "closed" if closed else "stopped" if following.stop() else None
            delivered = self.counts.delivered
            for name in list_shards(self._paths):
                yield from self._look(name, following.poll_s, forced=ending is not None)
            if self.counts.delivered == delivered:
                if ending:
                    self.ended = ending
                    return
                time.sleep(following.poll_s)

    def _look(self, name: ShardName, poll_s: float, *, forced: bool) -> Iterator[StoredTrajectory]:
        """Reads on in one shard where it is due; a quiet one is looked at less and less often."""
        walk, rhythm = self._walk(name), self._rhythms.setdefault(name, _Rhythm())
        now = time.monotonic()
        if walk.settled or (now < rhythm.due_at and not forced):
            return
        before = self.counts.delivered
        if not walk.is_idle():
            yield from walk.advance()
        elif now >= rhythm.settle_at:
            # The owner first, then its last bytes: the other order could miss an append between the two.
            walk.settled = is_finished(self._paths, name) and walk.is_idle()
            rhythm.settle_at = now + _SETTLE_S
        busy = self.counts.delivered > before
        rhythm.pause_s = 0.0 if busy else min(rhythm.pause_s * 2 or poll_s, _SLOWEST_POLLS * poll_s)
        rhythm.due_at = time.monotonic() + rhythm.pause_s
