"""One pass over a run: the feed, the groups in the making and the rows that wait, saved and loaded as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcroll.errors import ConfigError
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.run_facts import RunFacts
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.reading.batches import Batch, batch_of
from hpcroll.shards.reading.feed import Feed, Following
from hpcroll.shards.reading.freshness import Freshness
from hpcroll.shards.reading.groups import Fate, Group, GroupAssembly, GroupRule, Held, ReadyGroup, is_usable
from hpcroll.shards.reading.rows import Row, RowPacker, load_row, rows_from_json, rows_of, rows_to_json
from hpcroll.shards.reading.selection import Selection
from hpcroll.shards.reading.shuffle import EVERYTHING, Part, Shuffle, ShuffleWindow
from hpcroll.shards.reading.store import Store

_SHOWS_S = 120.0
"""Seconds until a record that was readable must be so again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A group that was released: `group.members` may be none. `stale`: how many only staleness took out."""

    group: Group
    stale: int


class Session:
    """What one iteration has delivered, and what it holds back; `state` after a delivery excludes it."""

    def __init__(
        self,
        store: Store,
        facts: RunFacts,
        selection: Selection,
        *,
        columns: frozenset[Column],
        following: Following | None,
        rule: GroupRule,
        freshness: Freshness,
        grouped: bool,
        part: Part = EVERYTHING,
        shuffle: Shuffle | None = None,
        summaries: bool = False,
        max_tokens: int = 1,
    ) -> None:
        """`grouped`: rollouts wait for their group, so that of level 0 only summaries are kept before.
        `summaries`: what is delivered may have only those; the bytes of `columns` are still checked."""
        self._selection = selection
        self._columns = frozenset[Column]() if summaries else columns
        self.freshness = freshness
        self._store = store
        self.feed = Feed(
            store,
            facts.final_leg,
            columns=columns,
            light=grouped or shuffle is not None,
            part=part,
            trust_marks=selection.trust_marks,
            following=following,
        )
        self.rule = rule
        self.assembly = GroupAssembly(rule, self._judge)
        self._window = ShuffleWindow(shuffle)
        self._packer = RowPacker(max_tokens)

    def singles(self) -> Iterator[StoredTrajectory]:
        """Rollouts one by one; raises `ConfigError` where a loaded state holds parts of groups."""
        if self._packer.waiting or self.assembly.is_busy:
            raise ConfigError("this reader state was saved within groups; go on with groups() or packed()")
        if self._window.shuffle is None:
            return (stored for stored in self.feed if self._delivers(stored.summary))
        return self._shuffled_singles()

    def decisions(self) -> Iterator[Decision]:
        """Groups as they are released, also those that the filters leave nothing of."""
        for stored in self.feed:
            ready = self.assembly.add(stored)
            if ready is not None:
                yield from map(self._decide, self._window.add(ready))
        for ready in self.assembly.rest():
            yield from map(self._decide, self._window.add(ready))
        yield from map(self._decide, self._window.rest())

    def groups(self) -> Iterator[Group]:
        """Groups as they become deliverable."""
        return (decision.group for decision in self.decisions() if decision.group.members)

    def row_batches(self, taken: Callable[[Group], None] = lambda _: None) -> Iterator[list[Row]]:
        """The rows of usable rollouts, in full batches and a last one; `taken` is told of each group."""
        yield from self._packer.full_batches()
        for group in self.groups():
            if usable := group.usable:
                taken(group)
                stats = group.stats
                for member in usable:
                    self._packer.add(rows_of(member, stats))
                yield from self._packer.full_batches()
        yield from self._packer.last_batch()

    def batches(self) -> Iterator[Batch]:
        """The rows of usable rollouts as batches."""
        held: dict[Place, StoredTrajectory] = {}

        def hold(group: Group) -> None:
            held.update((member.place, member) for member in group.usable)

        for rows in self.row_batches(hold):
            lacking = {row.place for row in rows} - held.keys()
            stored = held | self._store.read_all(lacking, self._columns, _SHOWS_S)
            waiting = {row.place for row in self._packer.waiting}
            for place in held.keys() - waiting:
                del held[place]
            yield batch_of([load_row(row, stored[row.place]) for row in rows if row.place in stored])

    def state(self) -> dict[str, Any]:
        return {
            **self.feed.state(),
            "groups": self.assembly.state(),
            "rows": rows_to_json(self._packer.waiting),
            "window": self._window.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.feed.load(state)
        self.assembly.load(state["groups"])
        self._packer.add(rows_from_json(state["rows"]))
        self._window.load(state["window"])

    def is_stale(self, summary: Summary) -> bool:
        """Whether the rollout lags too far behind what is published now; each that does is counted."""
        stale = self.freshness.is_stale(summary)
        self.assembly.counts.stale += stale
        return stale

    def _shuffled_singles(self) -> Iterator[StoredTrajectory]:
        for stored in self.feed:
            if self._selection.accepts(stored.summary):
                held = Held(0, stored.place, Fate.USABLE)
                yield from self._fresh(self._window.add(ReadyGroup(stored.rollout_id, 1, (held,))))
        yield from self._fresh(self._window.rest())

    def _fresh(self, drawn: Iterator[ReadyGroup]) -> Iterator[StoredTrajectory]:
        read = (self._whole(member) for ready in drawn for member in ready.members)
        return (stored for stored in read if stored is not None and not self.is_stale(stored.summary))

    def _decide(self, ready: ReadyGroup) -> Decision:
        read = [stored for member in ready.members if (stored := self._whole(member)) is not None]
        wanted = [stored for stored in read if self._selection.accepts(stored.summary)]
        members = tuple(stored for stored in wanted if not self.is_stale(stored.summary))
        group = Group(ready.group_id, ready.size, len(ready.members), members)
        return Decision(group, len(wanted) - len(members))

    def _whole(self, member: Held) -> StoredTrajectory | None:
        """The member with its columns; None where it was damaged since it was looked at, which is counted."""
        stored = member.stored
        if stored is not None and stored.columns >= self._columns:
            return stored
        return self._store.read_all([member.place], self._columns, _SHOWS_S).get(member.place)

    def _delivers(self, summary: Summary) -> bool:
        return self._selection.accepts(summary) and not self.is_stale(summary)

    def _judge(self, summary: Summary) -> Fate:
        if not is_usable(summary) or not self._selection.accepts(summary):
            return Fate.UNUSABLE
        return Fate.STALE if self.freshness.is_stale(summary) else Fate.USABLE
