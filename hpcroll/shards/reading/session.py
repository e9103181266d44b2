"""One pass over a run: the feed, the groups in the making and the rows that wait, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpcroll.errors import ConfigError
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.run_facts import RunFacts
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.reading.batches import Batch, batch_of
from hpcroll.shards.reading.feed import Feed, Following
from hpcroll.shards.reading.freshness import Freshness
from hpcroll.shards.reading.groups import Group, GroupAssembly, GroupRule, ReadyGroup
from hpcroll.shards.reading.rows import Row, RowPacker, load_row, rows_from_json, rows_of, rows_to_json
from hpcroll.shards.reading.selection import Selection

_TOKENS = frozenset({Column.TOKENS})


class Session:
    """What one iteration has delivered, and what it holds back; `state` after a delivery excludes it."""

    def __init__(
        self,
        paths: RunPaths,
        facts: RunFacts,
        selection: Selection,
        *,
        columns: frozenset[Column],
        following: Following | None,
        rule: GroupRule,
        freshness: Freshness,
        max_tokens: int = 1,
    ) -> None:
        self._selection = selection
        self._columns = columns
        self._freshness = freshness
        self.feed = Feed(
            paths,
            facts.final_leg,
            columns=columns,
            trust_marks=selection.trust_marks,
            following=following,
        )
        self.assembly = GroupAssembly(rule, self._passes)
        self._packer = RowPacker(max_tokens)

    def singles(self) -> Iterator[StoredTrajectory]:
        """Rollouts one by one; raises `ConfigError` where a loaded state holds parts of groups."""
        if self._packer.waiting or self.assembly.is_busy:
            raise ConfigError("this reader state was saved within groups; go on with groups() or packed()")
        return (stored for stored in self.feed if self._delivers(stored.summary))

    def groups(self) -> Iterator[Group]:
        """Groups as they become deliverable."""
        for stored in self.feed:
            ready = self.assembly.add(stored)
            if ready is not None:
                yield from self._deliver(ready)
        for ready in self.assembly.rest():
            yield from self._deliver(ready)

    def packed(self) -> Iterator[Batch]:
        """Batches from the usable rollouts of groups."""
        held: dict[Place, StoredTrajectory] = {}

        def load(rows: Sequence[Row]) -> Batch:
            loaded = []
            for row in rows:
                stored = held.get(row.place) or self.feed.read_again(row.place, _TOKENS)
                loaded.append(load_row(row, stored))
            waiting = {row.place for row in self._packer.waiting}
            for place in held.keys() - waiting:
                del held[place]
            return batch_of(loaded)

        yield from map(load, self._packer.full_batches())
        for group in self.groups():
            if usable := group.usable:
                stats = group.stats
                held |= {member.place: member for member in usable}
                for member in usable:
                    self._packer.add(rows_of(member, stats))
                yield from map(load, self._packer.full_batches())
        yield from map(load, self._packer.last_batch())

    def state(self) -> dict[str, Any]:
        return {
            "shards": self.feed.state(),
            "groups": self.assembly.state(),
            "rows": rows_to_json(self._packer.waiting),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.feed.load(state["shards"])
        self.assembly.load(state["groups"])
        self._packer.add(rows_from_json(state["rows"]))

    def _deliver(self, ready: ReadyGroup) -> Iterator[Group]:
        read = (self.feed.read_again(place, self._columns) for place in ready.places)
        members = tuple(stored for stored in read if self._delivers(stored.summary))
        if members:
            yield Group(ready.group_id, ready.size, len(ready.places), members)

    def _delivers(self, summary: Summary) -> bool:
        if not self._selection.accepts(summary):
            return False
        stale = self._freshness.is_stale(summary)
        self.assembly.counts.stale += stale
        return not stale

    def _passes(self, summary: Summary) -> bool:
        return self._selection.accepts(summary) and not self._freshness.is_stale(summary)
