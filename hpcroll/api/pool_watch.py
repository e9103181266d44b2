"""What a pool sees of the run: which groups are committed, which had no variance, how long rollouts were."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcroll.contract import Status
from hpcroll.policy.ledger import Bias, Spread
from hpcroll.shards import Column, StoredTrajectory, open_run


@dataclass(slots=True)
class _OpenGroup:
    size: int
    committed: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of its usable rollouts."""


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

    def __init__(self, run_dir: Path, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._reader = open_run(run_dir, columns=(Column.RECORD,))
        self._cursor: dict[str, Any] | None = state.get("cursor")
        self._open = {
            group_id: _OpenGroup(size, committed, list(rewards))
            for group_id, (size, committed, rewards) in state.get("open", {}).items()
        }
        self.flat: Counter[str] = Counter(state.get("flat", {}))
        """Complete groups without variance in their usable rewards, by task."""
        self.cancelling: set[str] = set(state.get("cancelling", ()))
        """Groups that no step needs, all of which was cancelled, and that are not complete yet."""
        self.cancelled: int = state.get("cancelled", 0)
        """How many of those are complete."""
        self.surplus: set[str] = set(state.get("surplus", ()))
        """Groups that were delivered, and whose other members were cancelled."""

    def state(self) -> dict[str, Any]:
        return {
            "cursor": self._cursor,
            "open": {group_id: list(asdict(group).values()) for group_id, group in self._open.items()},
            "flat": dict(self.flat),
            "cancelling": sorted(self.cancelling),
            "cancelled": self.cancelled,
            "surplus": sorted(self.surplus),
        }

    def is_open(self, group_id: str) -> bool:
        """Some of the group is committed and some is not, as far as was read."""
        return group_id in self._open

    def look(self, delivered: Collection[str]) -> tuple[Bias, tuple[str, ...]]:
        """Reads on; the lengths of what was read, and the groups whose cancellation has done its work.

        `delivered`: groups of the step, which count as delivered even where they were cancelled before.
        """
        kept, cut, never = _Lengths(), _Lengths(), 0
        finished = []
        self.surplus |= self.cancelling.intersection(delivered)
        self.cancelling -= set(delivered)
        if self._cursor is not None:
            self._reader.load_state_dict(self._cursor)
        for stored in self._reader:
            lengths = kept if stored.status is not Status.CANCELLED else cut
            run = stored.record.timing.run
            if stored.status is Status.CANCELLED and run is None:
                never += 1
            else:
                lengths.tokens.append(sum(stored.summary.lengths))
                if run is not None:
                    lengths.run_s.append(run.duration_s)
            if self._is_complete_with(stored):
                finished.append(stored.group_id)
        self._cursor = self._reader.state_dict()
        self.cancelled += len(self.cancelling.intersection(finished))
        withdrawn = (self.cancelling | self.surplus).intersection(finished)
        self.cancelling -= withdrawn
        self.surplus -= withdrawn
        bias = Bias(kept=kept.spread(), cancelled=cut.spread(), never_started=never)
        return bias, tuple(sorted(withdrawn))

    def _is_complete_with(self, stored: StoredTrajectory) -> bool:
        summary = stored.summary
        group = self._open.setdefault(summary.group_id, _OpenGroup(summary.group_size))
        group.committed += 1
        if summary.usable and summary.reward is not None:
            group.rewards.append(summary.reward)
        if group.committed < group.size:
            return False
        del self._open[summary.group_id]
        if group.rewards and len(set(group.rewards)) == 1:
            self.flat[summary.task_id] += 1
        return True
