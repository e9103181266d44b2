"""The stream of committed trajectories over both levels of a run, from a position that can be saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcroll.fs.atomic import read_fresh
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.shard_file import is_finished, list_shards
from hpcroll.shards.reading.cursor import Cursor
from hpcroll.shards.reading.pack_walk import PackWalk
from hpcroll.shards.reading.shuffle import Part
from hpcroll.shards.reading.store import GONE, Store

_SLOWEST_POLLS = 5
"""A quiet shard is looked at this many poll intervals apart, at most."""
_LOOKS_PER_S = 300
"""With very many shards, quiet ones are looked at so rarely that there are no more looks than this."""
_SETTLE_S = 10.0
"""Seconds between two questions whether a quiet shard's owner is gone."""


@dataclass(frozen=True, slots=True)
class Following:
    """How to wait for more: look every `poll_s` seconds until `stop` says so or the run is closed.

    A closed run is read on until nothing came for `linger_s` seconds: a mount may show its last records later
    than that it is closed. `looked` is called after every round of looks.
    """

    poll_s: float
    stop: Callable[[], bool]
    linger_s: float = 0.0
    looked: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Rhythm:
    """When something is looked at next, on this process's monotonic clock."""

    pause_s: float = 0.0
    due_at: float = 0.0
    settle_at: float = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at

    def looked(self, *, busy: bool, first_s: float, slowest_s: float) -> None:
        self.pause_s = 0.0 if busy else min(self.pause_s * 2 or first_s, slowest_s)
        self.due_at = time.monotonic() + self.pause_s


class Feed:
    """Hands out committed records: first those of packs, then level 0 shard by shard, as they were appended.

    Each is handed out once, over any number of `state` and `load` round trips, and wherever it lies by
    then. Memory grows with shards, never with records.
    """

    def __init__(
        self,
        store: Store,
        leg: str,
        *,
        columns: frozenset[Column],
        light: bool,
        part: Part,
        trust_marks: bool,
        following: Following | None,
    ) -> None:
        """`light`: of records on level 0 the bytes of `columns` are checked, and only summaries are kept.
        `part`: which groups to hand out, the others count as handed out."""
        self.ended: str | None = None
        """Why the stream ended: `closed`, the run is; `stopped`, the follower was; None while it goes on."""
        self._store = store
        self._paths = store.paths
        self._counts = store.counts
        self._following = following
        self._cursor = Cursor(self._paths, leg, columns, trust_marks, self._counts, light=light)
        self._packs = PackWalk(store, self._cursor, columns, part)
        self._part = part
        self._rhythms: dict[ShardName, _Rhythm] = {}
        self._chain_rhythm, self._list_rhythm = _Rhythm(), _Rhythm()
        self._names: list[ShardName] = []

    def __iter__(self) -> Iterator[StoredTrajectory]:
        self.ended = None
        if self._following is None:
            yield from self._to_the_end()
        else:
            yield from self._follow(self._following)

    def state(self) -> dict[str, Any]:
        """The position, as JSON."""
        return self._cursor.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a position that `state` gave."""
        self._cursor.load(state, self._store)

    def _to_the_end(self) -> Iterator[StoredTrajectory]:
        self._store.refresh()
        while True:
            yield from self._packs.advance()
            for name in self._list():
                yield from self._advance(name)
            # What retention deleted before that listing had been packed before: in a pack that shows now.
            if self._store.refresh() == self._cursor.pack:
                self.ended = "closed"
                return

    def _follow(self, following: Following) -> Iterator[StoredTrajectory]:
        quiet_since: float | None = None
        while True:
            # Asked before the shards are: whatever was committed before then is still delivered.
            self._counts.opens += 1
            closed = read_fresh(self._paths.closed) is not None
            ending = "closed" if closed else "stopped" if following.stop() else None
            delivered = self._counts.delivered
            yield from self._round(following.poll_s, forced=ending is not None)
            following.looked()
            if self._counts.delivered > delivered:
                quiet_since = None
                continue
            if ending is not None and quiet_since is None:
                quiet_since = time.monotonic()
            lingers = ending == "closed" and time.monotonic() - (quiet_since or 0.0) < following.linger_s
            if ending is None or lingers:
                time.sleep(following.poll_s)
            elif self._store.refresh() == self._cursor.pack:
                self.ended = ending
                return

    def _round(self, poll_s: float, *, forced: bool) -> Iterator[StoredTrajectory]:
        """One look at everything that is due."""
        slowest_s = max(_SLOWEST_POLLS * poll_s, len(self._rhythms) / _LOOKS_PER_S)
        if forced or self._chain_rhythm.is_due():
            new = self._store.refresh() > self._cursor.pack
            yield from self._packs.advance()
            self._chain_rhythm.looked(busy=new, first_s=poll_s, slowest_s=slowest_s)
        if forced or self._list_rhythm.is_due():
            names = self._list()
            self._let_go(names)
            self._list_rhythm.looked(busy=names != self._names, first_s=poll_s, slowest_s=slowest_s)
            self._names = names
        for name in self._names:
            yield from self._look(name, poll_s, slowest_s, forced=forced)

    def _look(
        self, name: ShardName, poll_s: float, slowest_s: float, *, forced: bool
    ) -> Iterator[StoredTrajectory]:
        """Reads on in one shard where it is due; a quiet one is looked at less and less often."""
        rhythm = self._rhythms.setdefault(name, _Rhythm())
        if not (forced or rhythm.is_due()) or self._cursor.walk(name).settled:
            return
        before = self._counts.delivered
        yield from self._advance(name, rhythm)
        busy = self._counts.delivered > before
        rhythm.looked(busy=busy, first_s=poll_s, slowest_s=slowest_s)

    def _advance(self, name: ShardName, rhythm: _Rhythm | None = None) -> Iterator[StoredTrajectory]:
        walk = self._cursor.walk(name)
        try:
            if rhythm is None or not walk.is_idle():
                for stored in walk.advance():
                    if self._part.owns(stored.group_id):
                        yield stored
                    else:
                        self._counts.delivered -= 1
            elif time.monotonic() >= rhythm.settle_at:
                # The owner first, then its last bytes: the other order could miss an append between the two.
                self._counts.opens += 2
                walk.settled = is_finished(self._paths, name) and walk.is_idle()
                rhythm.settle_at = time.monotonic() + _SETTLE_S
        except OSError as error:
            if error.errno not in GONE:
                raise
            # Deleted after it was packed: what this reader has not had of it comes from the packs.
            self._chain_rhythm.due_at = 0.0
            self._cursor.forget(name)

    def _let_go(self, names: list[ShardName]) -> None:
        """Forgets shards that are not there any more, so that memory does not grow with those that were, and
        that their space is free."""
        there = set(names)
        self._store.shards.close_others(there)
        for name in self._rhythms.keys() - there:
            del self._rhythms[name]
            self._cursor.forget(name)

    def _list(self) -> list[ShardName]:
        self._counts.listings += 1
        return list_shards(self._paths)
