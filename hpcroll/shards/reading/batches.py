"""Packed batches: segments laid end to end, as variable-length attention kernels take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import Flags, Floats, Ids, SegmentTokens
from hpcroll.errors import ShardError
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.stored import StoredTrajectory


@dataclass(frozen=True, slots=True)
class Batch:
    """S segments of N tokens in all; segment s is tokens [cu_seqlens[s], cu_seqlens[s + 1]).

    `ids` uint32 (N,); `logprobs` float32 (N,), of token i itself, NaN for context; `loss_mask` uint8 (N,).
    Per segment: `cu_seqlens` int32 (S + 1,), `reward` float32 (S,), `rollout_weight` float32 (S,) (the
    segment's share of its rollout), `group_id` and `rollout_id` str (S,), `version_low` and `version_high`
    int32 (S,), the policy versions that sampled it.
    """

    ids: Ids
    cu_seqlens: NDArray[np.int32]
    logprobs: Floats
    loss_mask: Flags
    reward: Floats
    rollout_weight: Floats
    group_id: NDArray[np.str_]
    rollout_id: NDArray[np.str_]
    version_low: NDArray[np.int32]
    version_high: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.reward)


@dataclass(frozen=True, slots=True)
class Row:
    """One segment that waits for its batch."""

    place: Place
    segment_index: int
    rollout_id: str
    summary: Summary
    tokens: SegmentTokens

    @property
    def length(self) -> int:
        return len(self.tokens)


def rows_of(stored: StoredTrajectory) -> Iterator[Row]:
    """The segments of a usable rollout that hold a token to train on."""
    for index, tokens in enumerate(stored.tokens):
        if tokens.loss_mask.any():
            yield Row(stored.place, index, stored.rollout_id, stored.summary, tokens)


class Packer:
    """Fills batches of at most `max_tokens` tokens in the order of arrival; holds less than one batch and
    one group."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.waiting: deque[Row] = deque()

    def add(self, rows: Iterable[Row]) -> None:
        """Queues `rows`; raises `ShardError` where one alone is longer than a batch."""
        for row in rows:
            if row.length > self._max_tokens:
                raise ShardError(
                    f"rollout {row.rollout_id}: segment {row.segment_index} has {row.length} tokens, a batch "
                    f"holds {self._max_tokens}; raise max_tokens, or lower model.context_tokens of the run"
                )
            self.waiting.append(row)

    def full_batches(self) -> Iterator[Batch]:
        """Batches that no further row would fit into; their rows no longer wait."""
        while (count := self._fitting()) < len(self.waiting):
            yield self._take(count)

    def last_batch(self) -> Iterator[Batch]:
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

    def _take(self, count: int) -> Batch:
        return _batch([self.waiting.popleft() for _ in range(count)])


def _batch(rows: Sequence[Row]) -> Batch:
    segments = [(row.summary, row.segment_index) for row in rows]
    ends = np.cumsum([0, *(row.length for row in rows)], dtype=np.int32)
    return Batch(
        ids=np.concatenate([row.tokens.ids for row in rows]),
        cu_seqlens=ends,
        logprobs=np.concatenate([row.tokens.logprobs for row in rows]),
        loss_mask=np.concatenate([row.tokens.loss_mask for row in rows]),
        reward=np.array([summary.reward for summary, _ in segments], np.float32),
        rollout_weight=np.array([summary.weights[index] for summary, index in segments], np.float32),
        group_id=np.array([summary.group_id for summary, _ in segments]),
        rollout_id=np.array([row.rollout_id for row in rows]),
        version_low=np.array([summary.version_low[index] for summary, index in segments], np.int32),
        version_high=np.array([summary.version_high[index] for summary, index in segments], np.int32),
    )
