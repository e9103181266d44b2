"""What a pool sees of the run: which groups are of use, which never will be, how long rollouts were."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcroll.contract import Status
from hpcroll.policy import PolicyVersion
from hpcroll.policy.ledger import Bias, Spread
from hpcroll.shards import Column, StoredTrajectory, open_run


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Which groups a trainer can use: the rule of its reader."""

    min_usable: int | None = None
    """A group is decided by its first so many usable rollouts; None: when all of it is committed."""
    drop_zero_variance: bool = True
    max_lag: int | None = None


@dataclass(slots=True)
class _Group:
    """A group that is not committed yet, or that waits for the trainer."""

    size: int
    committed: int = 0
    decided: bool = False
    usable: list[tuple[float, str, int]] = field(default_factory=list)
    """Reward, lineage and oldest version of the usable rollouts that decide; version -1: none."""

    def fresh(self, newest: PolicyVersion | None, max_lag: int | None) -> list[float]:
        """The rewards of those that are not too many versions behind."""
        if newest is None or max_lag is None:
            return [reward for reward, _, _ in self.usable]
        return [
            reward
            for reward, lineage, oldest in self.usable
            if oldest < 0 or (lineage == newest.lineage and newest.version - oldest <= max_lag)
        ]

    def to_json(self) -> list[Any]:
        return [self.size, self.committed, self.decided, [list(one) for one in self.usable]]

    @classmethod
    def from_json(cls, state: list[Any]) -> _Group:
        size, committed, decided, usable = state
        return cls(size, committed, decided, [(one[0], one[1], one[2]) for one in usable])


@dataclass(slots=True)
class _Lengths:
    tokens: list[int] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)

    def spread(self) -> Spread:
        return Spread(
            rollouts=len(self.tokens),
            tokens_mean=statistics.fmean(self.tokens) if self.tokens else None,
            tokens_median=statistics.median(self.tokens) if self.tokens else None,
            run_s_mean=statistics.fmean(self.run_s) if self.run_s else None,
            run_s_median=statistics.median(self.run_s) if self.run_s else None,
        )


class PoolWatch:
    """Reads what was committed since the last look; its state is JSON, as large as the open groups."""

    def __init__(self, run_dir: Path, use: GroupUse, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._use = use
        self._reader = open_run(run_dir, columns=(Column.RECORD,))
        self._cursor: dict[str, Any] | None = state.get("cursor")
        self._open = {name: _Group.from_json(group) for name, group in state.get("open", {}).items()}
        self._ready = {name: _Group.from_json(group) for name, group in state.get("ready", {}).items()}
        """Groups of use, until a step delivers them."""
        self.dropped: int = state.get("dropped", 0)
        """Groups that are of no use to the trainer."""
        self.flat: Counter[str] = Counter(state.get("flat", {}))
        """Those without variance in their usable rewards, by task."""
        self.cancelling: set[str] = set(state.get("cancelling", ()))
        """Groups that no step needs, all of which was cancelled, and that are not complete yet."""
        self.cancelled: int = state.get("cancelled", 0)
        """How many of those are complete."""
        self.surplus: set[str] = set(state.get("surplus", ()))
        """Groups that are decided, whose other members were cancelled, and that are not complete yet."""
        self._kept, self._cut, self._never_started = _Lengths(), _Lengths(), 0
        self._finished: set[str] = set()

    def state(self) -> dict[str, Any]:
        return {
            "cursor": self._cursor,
            "open": {name: group.to_json() for name, group in self._open.items()},
            "ready": {name: group.to_json() for name, group in self._ready.items()},
            "dropped": self.dropped,
            "flat": dict(self.flat),
            "cancelling": sorted(self.cancelling),
            "cancelled": self.cancelled,
            "surplus": sorted(self.surplus),
        }

    def decided_early(self, delivered: Collection[str] = ()) -> tuple[str, ...]:
        """Groups with members to come that the trainer will not look at; `delivered` ones are decided."""
        early = {name for name, group in self._open.items() if group.decided or name in delivered}
        return tuple(sorted(early - self.surplus - self.cancelling))

    def look(self, delivered: Collection[str], newest: PolicyVersion | None) -> None:
        """Reads on. `delivered`: groups of the step, also where they were cancelled before."""
        complete: set[str] = set()
        if self._cursor is not None:
            self._reader.load_state_dict(self._cursor)
        for stored in self._reader:
            run = stored.record.timing.run
            if stored.status is Status.CANCELLED and run is None:
                self._never_started += 1
            else:
                lengths = self._cut if stored.status is Status.CANCELLED else self._kept
                lengths.tokens.append(sum(stored.summary.lengths))
                if run is not None:
                    lengths.run_s.append(run.duration_s)
            if self._completes(stored, newest):
                complete.add(stored.group_id)
        self._cursor = self._reader.state_dict()
        self._forget(delivered, newest)
        self.cancelled += len(self.cancelling & complete)
        self._finished |= (self.cancelling | self.surplus) & complete
        self.cancelling -= complete
        self.surplus -= complete

    def account(self) -> tuple[Bias, tuple[str, ...]]:
        """The lengths of what was read since the last account, and the groups whose cancellation has done
        its work since."""
        bias = Bias(kept=self._kept.spread(), cancelled=self._cut.spread(), never_started=self._never_started)
        finished = tuple(sorted(self._finished))
        self._kept, self._cut, self._never_started = _Lengths(), _Lengths(), 0
        self._finished = set()
        return bias, finished

    def _completes(self, stored: StoredTrajectory, newest: PolicyVersion | None) -> bool:
        summary = stored.summary
        group = self._open.setdefault(summary.group_id, _Group(summary.group_size))
        group.committed += 1
        complete = group.committed >= group.size
        if not group.decided:
            if summary.usable and summary.reward is not None:
                oldest = summary.oldest_version
                group.usable.append((summary.reward, summary.lineage, -1 if oldest is None else oldest))
            fresh = len(group.fresh(newest, self._use.max_lag))
            if complete or (self._use.min_usable is not None and fresh >= self._use.min_usable):
                self._decide(summary.group_id, summary.task_id, group, newest)
        if complete:
            del self._open[summary.group_id]
        return complete

    def _decide(self, group_id: str, task_id: str, group: _Group, newest: PolicyVersion | None) -> None:
        group.decided = True
        rewards = group.fresh(newest, self._use.max_lag)
        flat = len(set(rewards)) == 1
        self.flat[task_id] += flat
        if len(rewards) < (self._use.min_usable or 1) or (flat and self._use.drop_zero_variance):
            self.dropped += 1
        else:
            self._ready[group_id] = group

    def _forget(self, delivered: Collection[str], newest: PolicyVersion | None) -> None:
        """Lets go of ready groups that a step delivered, or that are too old by now."""
        self.surplus |= self.cancelling.intersection(delivered)
        self.cancelling -= set(delivered)
        for name in self._ready.keys() & set(delivered):
            del self._ready[name]
        for name, group in list(self._ready.items()):
            if len(group.fresh(newest, self._use.max_lag)) < (self._use.min_usable or 1):
                del self._ready[name]
                self.dropped += 1
