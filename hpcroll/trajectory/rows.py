"""What a trainer is given: rows, tokens, and what merging saves against one row per model call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcroll.contract import Trajectory


@dataclass(frozen=True, slots=True)
class RowStats:
    """Counts over one or more rollouts; they add up with `+`.

    A row is one sequence that is trained on: with merging a segment, else one model call (its prompt and
    its samples). Only rows that hold a trained token count.
    """

    rollouts: int = 0
    calls: int = 0
    """Model calls whose samples stand in a segment."""
    segments: int = 0
    call_rows: int = 0
    """Rows with one row per call."""
    merged_rows: int = 0
    """Rows as recorded."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    dropped_tokens: int = 0
    """Sampled tokens that stand in no segment."""
    stored_tokens: int = 0
    """Length of all segments."""
    distinct_tokens: int = 0
    """The same, with what a fork shares with its parent counted once."""
    call_row_tokens: int = 0
    """Length of all rows with one row per call."""
    merged_row_tokens: int = 0
    """Length of all rows as recorded."""
    began: Mapping[str, int] = field(default_factory=dict)
    """Segments by the reason for which they began."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Segments by role."""

    def __add__(self, other: RowStats) -> RowStats:
        values: dict[str, Any] = {}
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            values[name] = _counted(mine, theirs) if isinstance(mine, dict) else mine + theirs
        return RowStats(**values)

    @property
    def fewer_rows(self) -> float | None:
        """How many times fewer rows merging gives; None without rows."""
        return self.call_rows / self.merged_rows if self.merged_rows else None

    @property
    def repetition(self) -> float | None:
        """Stored tokens per distinct one, 1.0 where no fork repeats anything; None without tokens."""
        return self.stored_tokens / self.distinct_tokens if self.distinct_tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Every count and ratio, as JSON values."""
        return {**asdict(self), "fewer_rows": self.fewer_rows, "repetition": self.repetition}


def row_stats(trajectory: Trajectory) -> RowStats:
    """The counts of one rollout; needs segments, call spans and the token arrays of its record."""
    record, tokens = trajectory.record, trajectory.tokens
    trained = [int(arrays.loss_mask.sum()) for arrays in tokens]
    rows = [
        span.start + span.length
        for span in record.call_spans
        if tokens[span.segment_index].loss_mask[span.start : span.start + span.length].any()
    ]
    shared = sum(segment.parent.length for segment in record.segments if segment.parent is not None)
    stored = sum(segment.length for segment in record.segments)
    return RowStats(
        rollouts=1,
        calls=len(record.call_spans),
        segments=len(record.segments),
        call_rows=len(rows),
        merged_rows=sum(count > 0 for count in trained),
        sampled_tokens=trajectory.action_tokens,
        trained_tokens=sum(trained),
        dropped_tokens=sum(drop.length for drop in record.dropped),
        stored_tokens=stored,
        distinct_tokens=stored - shared,
        call_row_tokens=sum(rows),
        merged_row_tokens=sum(
            segment.length for segment, count in zip(record.segments, trained, strict=True) if count
        ),
        began=_counted(segment.began.value for segment in record.segments),
        roles=_counted(segment.role.value for segment in record.segments),
    )


def _counted(*counts: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for values in counts:
        total.update(values)
    return dict(sorted(total.items()))
