"""A batch as a dictionary of tensors."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hpcroll.shards import Batch

_PER_SEGMENT = (
    "reward",
    "rollout_weight",
    "version_low",
    "version_high",
    "group_reward_mean",
    "group_reward_std",
    "group_count",
)


def tensors(batch: Batch) -> dict[str, Any]:
    """`batch`, laid end to end, on the CPU: `ids` int64 (N,), `position_ids` int64 (N,), `logprobs` float32
    (N,), `loss_mask` bool (N,), `cu_seqlens` int32 (S + 1,), `max_seqlen` int, and per segment what
    `hpcroll.shards.Batch` has, with `group_id` and `rollout_id` as lists of str.

    Memory is shared with the batch where the type is the same.
    """
    return {
        "ids": _tensor(batch.ids.astype(np.int64)),
        "position_ids": _tensor(batch.position_ids.astype(np.int64)),
        "logprobs": _tensor(batch.logprobs),
        "loss_mask": _tensor(batch.loss_mask.astype(np.bool_)),
        "cu_seqlens": _tensor(batch.cu_seqlens),
        "max_seqlen": batch.max_seqlen,
        **_per_segment(batch),
    }


def padded_tensors(
    batch: Batch, *, side: Literal["left", "right"] = "right", pad_id: int = 0, multiple_of: int = 1
) -> dict[str, Any]:
    """`batch` as rows of one length, see `Batch.padded`: `ids` int64, `position_ids` int64, `attention_mask`
    int64, `logprobs` float32 and `loss_mask` bool, all (S, T), and the same per segment as `tensors`."""
    padded = batch.padded(side=side, pad_id=pad_id, multiple_of=multiple_of)
    return {
        "ids": _tensor(padded.ids.astype(np.int64)),
        "position_ids": _tensor(padded.position_ids.astype(np.int64)),
        "attention_mask": _tensor(padded.attention_mask.astype(np.int64)),
        "logprobs": _tensor(padded.logprobs),
        "loss_mask": _tensor(padded.loss_mask.astype(np.bool_)),
        **_per_segment(batch),
    }


def _per_segment(batch: Batch) -> dict[str, Any]:
    numbers = {name: _tensor(getattr(batch, name)) for name in _PER_SEGMENT}
    return {**numbers, "group_id": batch.group_id.tolist(), "rollout_id": batch.rollout_id.tolist()}


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # A tensor of memory that must not be written to is refused with a warning: copy what is read-only.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
