"""Rows as padded arrays in one safetensors file, which opens as tensors without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.exporters.json_text import json_text
from hpcroll.exporters.packages import need
from hpcroll.exporters.rows import Row

Array = NDArray[Any]


def pad_right(parts: Sequence[Array], dtype: Any, fill: float = 0) -> Array:
    """`parts`, of lengths T_i, as one array (B, max T_i) that begins with them."""
    padded = np.full((len(parts), max(map(len, parts))), fill, dtype)
    for line, part in zip(padded, parts, strict=True):
        line[: len(part)] = part
    return padded


def pad_left(parts: Sequence[Array], dtype: Any, fill: float = 0) -> Array:
    """`parts`, of lengths T_i, as one array (B, max T_i) that ends with them."""
    padded = np.full((len(parts), max(map(len, parts))), fill, dtype)
    for line, part in zip(padded, parts, strict=True):
        line[len(line) - len(part) :] = part
    return padded


def to_safetensors(tensors: dict[str, Array], rows: Sequence[Row], exporter: str) -> bytes:
    """The file; its metadata `rows` is JSON with what tensors cannot say, one object per row."""
    save = need("safetensors.numpy", exporter).save
    # One key only: the library writes several in no fixed order, and a part's bytes must not vary.
    data: bytes = save(tensors, metadata={"rows": json_text([describe_row(row) for row in rows])})
    return data


def describe_row(row: Row) -> dict[str, Any]:
    """What a row is of, as JSON values."""
    summary = row.rollout.summary
    return {
        "rollout_id": row.rollout.rollout_id,
        "segment_index": row.segment_index,
        "group_id": summary.group_id,
        "sample_index": summary.sample_index,
        "task_id": summary.task_id,
        "status": str(summary.status),
        "reward": row.reward,
        "advantage": row.advantage,
        "weight": row.weight,
        "policy_name": summary.policy_name,
        "lineage": summary.lineage,
    }
