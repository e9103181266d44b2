"""Rows: the segments of usable rollouts on their way into a batch, and what their group says of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from hpcroll.contract import SegmentTokens
from hpcroll.errors import ShardError
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.place import Place, place_of
from hpcroll.shards.format.stored import StoredTrajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A group as it was delivered, with the rewards of its usable rollouts.

    `reward_std` is that of the population (divided by n), 0.0 where all are equal.
    """

    group_id: str
    size: int
    committed: int
    """How many of `size` were committed when the group was delivered."""
    usable: int
    """How many rollouts the statistics are of."""
    reward_mean: float
    reward_std: float


@dataclass(frozen=True, slots=True)
class Row:
    """One segment of a usable rollout, without its tokens."""

    place: Place
    rollout_id: str
    segment_index: int
    length: int
    trained: int
    """How many of its `length` tokens are trained on."""
    version_low: int
    version_high: int
    policy_name: str
    group: GroupStats


@dataclass(frozen=True, slots=True)
class LoadedRow:
    """The same with its tokens."""

    rollout_id: str
    segment_index: int
    summary: Summary
    tokens: SegmentTokens
    group: GroupStats


def stats_of(group_id: str, size: int, committed: int, usable: Iterable[Summary]) -> GroupStats:
    """The statistics of a group over its `usable` rollouts, of which there is at least one."""
    rewards = np.array([summary.reward for summary in usable], np.float64)
    if (rewards == rewards[:1]).all():  # exactly 0.0, whatever rounding would make of it
        return GroupStats(group_id, size, committed, len(rewards), float(rewards[0]), 0.0)
    return GroupStats(group_id, size, committed, len(rewards), float(rewards.mean()), float(rewards.std()))


def rows_of(stored: StoredTrajectory, group: GroupStats) -> Iterator[Row]:
    """The segments of a usable rollout that hold a token to train on.

    Reads the tokens only where the summary does not say how many of them are trained on.
    """
    summary = stored.summary
    trained = summary.trained or tuple(int(tokens.loss_mask.sum()) for tokens in stored.tokens)
    for index, count in enumerate(trained):
        if count:
            yield Row(
                place=stored.place,
                rollout_id=stored.rollout_id,
                segment_index=index,
                length=summary.lengths[index],
                trained=count,
                version_low=summary.version_low[index],
                version_high=summary.version_high[index],
                policy_name=summary.policy_name,
                group=group,
            )


def load_row(row: Row, stored: StoredTrajectory) -> LoadedRow:
    """`row` with the tokens of the rollout that it is a segment of."""
    return LoadedRow(
        row.rollout_id, row.segment_index, stored.summary, stored.tokens[row.segment_index], row.group
    )


class RowPacker:
    """Fills batches of at most `max_tokens` tokens in the order of arrival; holds less than one batch and
    one group."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.waiting: deque[Row] = deque()

    def add(self, rows: Iterable[Row]) -> None:
        """Queues `rows`; raises `ShardError` where one alone is longer than a batch."""
        for row in rows:
            require_fits(row, self._max_tokens)
            self.waiting.append(row)

    def full_batches(self) -> Iterator[list[Row]]:
        """Batches that no further row would fit into; their rows no longer wait."""
        while (count := self._fitting()) < len(self.waiting):
            yield self._take(count)

    def last_batch(self) -> Iterator[list[Row]]:
        """What is left, at the end of the stream."""
        if self.waiting:
            yield self._take(len(self.waiting))

    def _fitting(self) -> int:
        total = 0
        for count, row in enumerate(self.waiting):
            total += row.length
            if total > self._max_tokens:
                return count
        return len(self.waiting)

    def _take(self, count: int) -> list[Row]:
        return [self.waiting.popleft() for _ in range(count)]


def require_fits(row: Row, max_tokens: int) -> None:
    """Raises `ShardError` where the row alone is longer than a batch."""
    if row.length > max_tokens:
        raise ShardError(
            f"rollout {row.rollout_id}: segment {row.segment_index} has {row.length} tokens, a batch "
            f"holds {max_tokens}; raise max_tokens, or lower model.context_tokens of the run"
        )


def rows_to_json(rows: Iterable[Row]) -> dict[str, Any]:
    """`rows` with the groups they belong to, for a saved state or a plan; what repeats stands there once."""
    shards, policies = _Table[str](), _Table[str]()
    groups = _Table[GroupStats]()
    entries = [
        [
            shards.number(str(row.place.shard)),
            row.place.offset,
            row.rollout_id,
            row.segment_index,
            row.length,
            row.trained,
            row.version_low,
            row.version_high,
            policies.number(row.policy_name),
            groups.number(row.group),
        ]
        for row in rows
    ]
    return {
        "shards": list(shards.known),
        "policies": list(policies.known),
        "groups": [list(astuple(group)) for group in groups.known],
        "rows": entries,
    }


def rows_from_json(data: dict[str, Any]) -> list[Row]:
    """The inverse of `rows_to_json`."""
    groups = [GroupStats(*fields) for fields in data["groups"]]
    rows = []
    for entry in data["rows"]:
        shard, offset, rollout_id, index, length, trained, low, high, policy, group = entry
        place, name = place_of(data["shards"][shard], offset), data["policies"][policy]
        rows.append(Row(place, rollout_id, index, length, trained, low, high, name, groups[group]))
    return rows


@dataclass(slots=True)
class _Table(Generic[T]):
    known: dict[T, int] = field(default_factory=dict)

    def number(self, value: T) -> int:
        return self.known.setdefault(value, len(self.known))
