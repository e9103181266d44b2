"""Batches of segments, laid end to end as variable-length attention kernels take them, or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import Flags, Floats, Ids
from hpcroll.shards.reading.rows import LoadedRow


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """S segments, each a row of T tokens, T the length of the longest.

    `ids` uint32 (S, T), `attention_mask` uint8 (S, T), 1 at tokens, 0 at padding; `logprobs` float32 (S, T),
    NaN for context and 0 at padding; `loss_mask` uint8 (S, T), 0 at padding; `position_ids` int32 (S, T),
    counted from each segment's first token, 0 at padding.
    """

    ids: Ids
    attention_mask: Flags
    logprobs: Floats
    loss_mask: Flags
    position_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """S segments of N tokens in all; segment s is tokens [cu_seqlens[s], cu_seqlens[s + 1]).

    `ids` uint32 (N,); `logprobs` float32 (N,), of token i itself, NaN for context; `loss_mask` uint8 (N,).
    Per segment: `cu_seqlens` int32 (S + 1,), `reward` float32 (S,), `rollout_weight` float32 (S,) (the
    segment's share of its rollout), `group_id` and `rollout_id` str (S,), `version_low` and `version_high`
    int32 (S,), the policy versions that sampled it. Of the rewards of its group's usable rollouts, also
    those in other batches and on other ranks: `group_reward_mean` float32 (S,), `group_reward_std` float32
    (S,) (of the population, divided by n), `group_count` int32 (S,).

    S may be 0: then a step had fewer segments than micro-batches.
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
    group_reward_mean: Floats
    group_reward_std: Floats
    group_count: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment, 0 where there is none."""
        return int(np.diff(self.cu_seqlens).max(initial=0))

    @property
    def segment_of_token(self) -> NDArray[np.int64]:
        """int64 (N,): the segment that each token belongs to; spreads a value per segment over its tokens."""
        return np.repeat(np.arange(len(self)), np.diff(self.cu_seqlens))

    @property
    def position_ids(self) -> NDArray[np.int32]:
        """int32 (N,): the place of each token in its segment, from 0."""
        starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return np.arange(len(self.ids), dtype=np.int32) - starts

    def padded(
        self, *, side: Literal["left", "right"] = "right", pad_id: int = 0, multiple_of: int = 1
    ) -> PaddedBatch:
        """The segments as rows of one length, a multiple of `multiple_of`; padding goes to `side`."""
        lengths = np.diff(self.cu_seqlens)
        width = -(-self.max_seqlen // multiple_of) * multiple_of
        column = np.arange(width)
        from_start = column[None, :] if side == "right" else column[None, :] - (width - lengths[:, None])
        real = (from_start >= 0) & (from_start < lengths[:, None])

        def spread(values: NDArray[Any], filler: float) -> NDArray[Any]:
            rows = np.full(real.shape, filler, values.dtype)
            rows[real] = values
            return rows

        return PaddedBatch(
            ids=spread(self.ids, pad_id),
            attention_mask=real.astype(np.uint8),
            logprobs=spread(self.logprobs, 0.0),
            loss_mask=spread(self.loss_mask, 0),
            position_ids=spread(self.position_ids, 0),
        )


def batch_of(rows: Sequence[LoadedRow]) -> Batch:
    """The batch of `rows`, in their order."""
    summaries = [(row.summary, row.segment_index) for row in rows]
    tokens = [row.tokens for row in rows]
    groups = [row.group for row in rows]
    return Batch(
        ids=_joined([part.ids for part in tokens], np.uint32),
        cu_seqlens=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        logprobs=_joined([part.logprobs for part in tokens], np.float32),
        loss_mask=_joined([part.loss_mask for part in tokens], np.uint8),
        reward=np.array([summary.reward for summary, _ in summaries], np.float32),
        rollout_weight=np.array([summary.weights[index] for summary, index in summaries], np.float32),
        group_id=np.array([summary.group_id for summary, _ in summaries], np.str_),
        rollout_id=np.array([row.rollout_id for row in rows], np.str_),
        version_low=np.array([summary.version_low[index] for summary, index in summaries], np.int32),
        version_high=np.array([summary.version_high[index] for summary, index in summaries], np.int32),
        group_reward_mean=np.array([group.reward_mean for group in groups], np.float32),
        group_reward_std=np.array([group.reward_std for group in groups], np.float32),
        group_count=np.array([group.usable for group in groups], np.int32),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    if len(parts) == 1:
        return parts[0]  # a batch of one segment copies nothing
    return np.concatenate(parts) if parts else np.empty(0, dtype)
