"""Rank 0's part: from the stream of groups to the plan of the next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hpcroll.errors import ConfigError
from hpcroll.shards.reading.balance import Layout, balance
from hpcroll.shards.reading.groups import Group
from hpcroll.shards.reading.plan import Plan
from hpcroll.shards.reading.rows import Row, require_fits, rows_of
from hpcroll.shards.reading.session import Decision, Session
from hpcroll.shards.reading.step import Settle, StepCounts, StepVersions


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step is made of: `groups` whole groups, or whole groups with at least `rollouts` usable
    rollouts, or, with neither, one full micro-batch for every rank."""

    world: int
    max_tokens: int
    groups: int | None = None
    rollouts: int | None = None
    drop_zero_variance: bool = False
    last: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be 1 or more")
        if self.groups is not None and self.rollouts is not None:
            raise ConfigError("a step is made of groups or of rollouts: give one of the two")
        for name, count in (("groups", self.groups), ("rollouts", self.rollouts)):
            if count is not None and count < 1:
                raise ConfigError(f"steps: {name} is {count}; it must be 1 or more")
        if self.last not in ("keep", "drop"):
            raise ConfigError(f"steps: last is {self.last!r}; choose keep or drop")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Planner:
    """Plans step after step from one session; `counts` is what became of groups before it."""

    def __init__(
        self,
        session: Session,
        settings: StepSettings,
        counts: StepCounts,
        state: dict[str, Any],
        settle: Settle | None = None,
    ) -> None:
        """`state` is where `session` begins. `settle` is told at once of each group that no step will hold: a
        window that waits for the step's end might never let groups start that the step waits for."""
        session.assembly.dropped = self._tell
        self._settle = settle
        self._session = session
        self._settings = settings
        self._before = counts
        self._own = StepCounts()
        self._needed = session.rule.min_usable or 1
        self._decisions = session.decisions()
        self._batches = session.row_batches(self._note)
        self._ended: str | None = None
        self._last = (state, counts)
        """State and counts after the latest plan."""

    def plan(self, number: int) -> Plan:
        """The plan of step `number`; waits until there is enough for it, or the stream ends."""
        if self._ended is None:
            rows, layout = self._by_group() if self._is_grouped else self._by_batch()
            if self._is_kept(rows):
                return self._plan(number, rows, layout)
        state, counts = self._last
        if self._ended == "closed":
            counts = self._counts()
        versions = StepVersions(None, None, None)
        return Plan(number, (), ((),) * self._settings.world, counts, versions, state, end=self._ended)

    @property
    def _is_grouped(self) -> bool:
        return self._settings.groups is not None or self._settings.rollouts is not None

    def _is_kept(self, rows: list[Row]) -> bool:
        return bool(rows) and (self._ended is None or self._settings.last == "keep")

    def _plan(self, number: int, rows: list[Row], layout: Layout) -> Plan:
        state, counts = self._session.state(), self._counts()
        self._last = (state, counts)
        return Plan(number, tuple(rows), layout, counts, self._versions(rows), state)

    # One micro-batch for every rank

    def _by_batch(self) -> tuple[list[Row], Layout]:
        rows: list[Row] = []
        layout: list[tuple[tuple[int, ...], ...]] = []
        for batch in self._batches:
            layout.append((tuple(range(len(rows), len(rows) + len(batch))),))
            rows += batch
            if len(layout) == self._settings.world:
                return rows, tuple(layout)
        self._ended = self._session.feed.ended
        missing = self._settings.world - len(layout)
        return rows, (*layout, *[((),)] * missing)

    def _note(self, group: Group) -> None:
        self._count(delivered=1)

    # Whole groups

    def _by_group(self) -> tuple[list[Row], Layout]:
        chosen: list[Group] = []
        while not (self._is_enough(chosen) and self._is_enough(chosen := self._still_fresh(chosen))):
            decision = next(self._decisions, None)
            if decision is None:
                self._ended = self._session.feed.ended
                break
            if self._qualifies(decision):
                chosen.append(decision.group)
        rows = [row for group in chosen for row in self._rows(group)]
        if self._is_kept(rows):
            self._count(delivered=len(chosen))
        settings = self._settings
        lengths = [row.length for row in rows]
        return rows, balance(lengths, ranks=settings.world, max_tokens=settings.max_tokens)

    def _is_enough(self, chosen: list[Group]) -> bool:
        if self._settings.groups is not None:
            return len(chosen) >= self._settings.groups
        return sum(len(group.usable) for group in chosen) >= (self._settings.rollouts or 0)

    def _qualifies(self, decision: Decision) -> bool:
        """Whether the group can be part of a step; counts it where it cannot."""
        group = decision.group
        usable = len(group.usable)
        if usable < self._needed:
            stale = usable + decision.stale >= self._needed
            self._count(stale=stale, short=not stale)
        elif not any(True for _ in self._rows(group)):
            self._count(short=1)
        elif self._settings.drop_zero_variance and group.stats.reward_std == 0.0:
            self._count(zero_variance=1)
        else:
            return True
        self._tell()
        return False

    def _still_fresh(self, chosen: list[Group]) -> list[Group]:
        """The chosen groups without what became stale while the step was being filled."""
        kept = []
        for group in chosen:
            members = tuple(m for m in group.members if not self._session.is_stale(m.summary))
            decision = Decision(replace(group, members=members), len(group.members) - len(members))
            if self._qualifies(decision):
                kept.append(decision.group)
        return kept

    def _rows(self, group: Group) -> Iterator[Row]:
        stats = group.stats
        for member in group.usable:
            for row in rows_of(member, stats):
                require_fits(row, self._settings.max_tokens)
                yield row

    # Counts and versions

    def _count(self, **more: int) -> None:
        self._own = _sum(self._own, StepCounts(**{name: int(value) for name, value in more.items()}))

    def _tell(self) -> None:
        if self._settle is not None:
            counts = self._counts()
            self._settle(counts.settled, dropped=counts.settled - counts.delivered)

    def _counts(self) -> StepCounts:
        seen = self._session.assembly.counts
        met = StepCounts(short=seen.short, stale=seen.stale_groups)
        if self._ended == "closed":
            met = replace(met, incomplete=seen.incomplete)
        return _sum(self._before, _sum(self._own, met))

    def _versions(self, rows: Iterable[Row]) -> StepVersions:
        low = [row.version_low for row in rows if row.version_low >= 0]
        high = [row.version_high for row in rows if row.version_high >= 0]
        names = [row.policy_name for row in rows]
        newest = self._session.freshness.newest(names[0]) if names else None
        return StepVersions(min(low, default=None), max(high, default=None), newest)


def _sum(one: StepCounts, other: StepCounts) -> StepCounts:
    theirs = asdict(other)
    return StepCounts(**{name: value + theirs[name] for name, value in asdict(one).items()})
