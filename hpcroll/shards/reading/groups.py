"""Groups: the rollouts of one task, delivered together once there are enough of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from hpcroll.errors import ConfigError
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.place import Place, place_of
from hpcroll.shards.format.stored import StoredTrajectory
from hpcroll.shards.reading.rows import GroupStats, stats_of


def is_usable(summary: Summary) -> bool:
    """Whether a trainer can use the rollout: it is trainable, and has a valid reward."""
    return summary.usable and summary.reward is not None


class Fate(IntEnum):
    """What a member is for the group rule, judged when it was committed; stored in states as a number."""

    UNUSABLE = 0
    USABLE = 1
    STALE = 2
    """It would be usable, were its tokens not too many policy versions old."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """When a group is delivered. `min_usable` None: when all of it is committed.

    With `min_usable` = k: as soon as k of its rollouts are usable; what is committed later is counted as
    late, not delivered. `partial`: what is left at the end of the stream is delivered too.
    """

    min_usable: int | None = None
    partial: bool = False

    @classmethod
    def parse(cls, rule: str, min_usable: int | None) -> GroupRule:
        """`complete`, `any`, or a `min_usable` of 1 or more; raises `ConfigError` for anything else."""
        if min_usable is not None:
            if min_usable < 1:
                raise ConfigError(f"min_usable is {min_usable}; it must be 1 or more")
            return cls(min_usable=min_usable)
        if rule not in ("complete", "any"):
            raise ConfigError(f"group rule {rule!r} is unknown; choose complete or any, or give min_usable")
        return cls(partial=rule == "any")


COMPLETE = GroupRule()
"""The rule where none is given."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task. `members` are those that pass the reader's filters, by sample index."""

    group_id: str
    size: int
    committed: int
    """How many of `size` were committed when the group was delivered."""
    members: tuple[StoredTrajectory, ...]

    @property
    def complete(self) -> bool:
        return self.committed == self.size

    @property
    def usable(self) -> tuple[StoredTrajectory, ...]:
        """The members that a trainer can use: trainable, with a valid reward."""
        return tuple(member for member in self.members if is_usable(member.summary))

    @property
    def stats(self) -> GroupStats:
        """Of the usable members, of which there must be one."""
        summaries = [member.summary for member in self.usable]
        return stats_of(self.group_id, self.size, self.committed, summaries)


@dataclass(slots=True)
class GroupCounts:
    """What became of groups and members that were not delivered."""

    short: int = 0
    """Complete groups with too few usable rollouts."""
    stale_groups: int = 0
    """Groups that only staleness left with too few of them."""
    incomplete: int = 0
    """Groups that the stream ended on."""
    late: int = 0
    """Rollouts that were committed after their group was delivered."""
    stale: int = 0
    """Rollouts whose oldest token was too many policy versions old."""


@dataclass(slots=True)
class Held:
    """A member that waits for its group. `stored` is what was read of it, None where that was let go."""

    sample_index: int
    place: Place
    fate: Fate
    stored: StoredTrajectory | None = None


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group to be delivered: its members, by sample index."""

    group_id: str
    size: int
    members: tuple[Held, ...]


@dataclass(slots=True)
class _OpenGroup:
    size: int
    held: list[Held] = field(default_factory=list)

    def count(self, fate: Fate) -> int:
        return sum(member.fate is fate for member in self.held)


@dataclass(slots=True)
class GroupAssembly:
    """Collects members as places and summaries, so that memory grows with open groups only.

    What was read beyond the summary is kept for the group that came last: packed groups come whole.
    """

    rule: GroupRule
    judge: Callable[[Summary], Fate]
    counts: GroupCounts = field(default_factory=GroupCounts)
    dropped: Callable[[], None] = lambda: None
    """Called after a complete group was counted instead of released."""
    _open: dict[str, _OpenGroup] = field(default_factory=dict)
    _served: dict[str, int] = field(default_factory=dict)
    """Groups delivered early, and how many members are still to come."""
    _latest: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether members are held back, or still to come for a group that was delivered early."""
        return bool(self._open or self._served)

    def add(self, stored: StoredTrajectory) -> ReadyGroup | None:
        """Takes one committed rollout; returns its group where that is now to be delivered."""
        summary = stored.summary
        group_id = summary.group_id
        if group_id in self._served:
            self.counts.late += 1
            self._served[group_id] -= 1
            if not self._served[group_id]:
                del self._served[group_id]
            return None
        if group_id != self._latest:
            self._let_go()
            self._latest = group_id
        group = self._open.setdefault(group_id, _OpenGroup(summary.group_size))
        group.held.append(Held(summary.sample_index, stored.place, self.judge(summary), stored))
        complete = len(group.held) >= group.size
        if self.rule.min_usable is None:
            return self._release(group_id) if complete else None
        if group.count(Fate.USABLE) >= self.rule.min_usable:
            missing = group.size - len(group.held)
            if missing > 0:
                self._served[group_id] = missing
            return self._release(group_id)
        if complete:
            del self._open[group_id]
            self.counts.stale += group.count(Fate.STALE)
            if group.count(Fate.USABLE) + group.count(Fate.STALE) >= self.rule.min_usable:
                self.counts.stale_groups += 1
            else:
                self.counts.short += 1
            self.dropped()
        return None

    def rest(self) -> Iterator[ReadyGroup]:
        """At the end of the stream: what is left, where the rule delivers it."""
        for group_id in tuple(self._open):
            if self.rule.partial:
                yield self._release(group_id)
            else:
                self.counts.incomplete += 1

    def state(self) -> dict[str, Any]:
        """Open and early groups, as JSON."""
        return {
            "open": {
                group_id: [
                    group.size,
                    [[m.sample_index, str(m.place.shard), m.place.offset, int(m.fate)] for m in group.held],
                ]
                for group_id, group in self._open.items()
            },
            "served": dict(self._served),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._served = {group_id: int(missing) for group_id, missing in state["served"].items()}
        self._open = {
            group_id: _OpenGroup(
                size, [Held(i, place_of(shard, at), Fate(fate)) for i, shard, at, fate in held]
            )
            for group_id, (size, held) in state["open"].items()
        }

    def _let_go(self) -> None:
        """Drops what was read beyond the summaries, of the group that came last, if it is still open."""
        group = self._open.get(self._latest) if self._latest is not None else None
        for member in group.held if group is not None else ():
            if member.stored is not None and member.stored.columns:
                member.stored = None

    def _release(self, group_id: str) -> ReadyGroup:
        group = self._open.pop(group_id)
        return ReadyGroup(group_id, group.size, tuple(sorted(group.held, key=lambda m: m.sample_index)))
