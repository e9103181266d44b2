"""Parquet: one segment a row, token arrays as lists, for whatever reads tables."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hpcroll.config import Strict
from hpcroll.contract import SegmentTokens
from hpcroll.exporters.base import Fact, Part, Unit
from hpcroll.exporters.json_text import json_text
from hpcroll.exporters.packages import need
from hpcroll.exporters.rows import token_versions
from hpcroll.shards import Column, StoredTrajectory


class ParquetOptions(Strict):
    """Options of the format `parquet`."""

    level: int = Field(default=3, ge=1, le=22)
    """zstd's level."""


class Parquet:
    """`part-<number>.parquet`: one row per segment, in the order of rollouts and segments.

    A rollout without any segment has one row whose `segment_index` is null. `ids` uint32, `sampled` and
    `loss_mask` uint8, `logprobs` float32 (null where nothing was sampled) and `versions` int32 (-1 for
    context) are lists of one length. `record` is the whole record as JSON, in the first row of a rollout.
    """

    Options: ClassVar[type[Strict]] = ParquetOptions
    loses: ClassVar[tuple[Fact, ...]] = ()
    source: ClassVar[str] = "hpcroll's own columns in Apache Parquet: docs/reference/exporters.md"
    columns: ClassVar[frozenset[Column]] = frozenset(Column)
    unit: ClassVar[Unit] = Unit.ROLLOUT
    groups_per_part: int | None = None

    def __init__(self, options: ParquetOptions) -> None:
        self._options = options
        self._arrow = need("pyarrow", "parquet")
        self._parquet = need("pyarrow.parquet", "parquet")

    def names(self, number: int) -> tuple[str, ...]:
        return (f"part-{number:05d}.parquet",)

    def files(self, part: Part) -> Iterator[tuple[str, bytes]]:
        rows = [row for member in part.members for row in _rows(member)]
        table = self._arrow.Table.from_pylist(rows, schema=self._schema())
        sink = BytesIO()
        self._parquet.write_table(
            table, sink, compression="zstd", compression_level=self._options.level, row_group_size=64
        )
        yield self.names(part.number)[0], sink.getvalue()

    def _schema(self) -> Any:
        pa = self._arrow
        return pa.schema(
            [
                ("run_id", pa.string()),
                ("rollout_id", pa.string()),
                ("group_id", pa.string()),
                ("sample_index", pa.int32()),
                ("task_id", pa.string()),
                ("status", pa.string()),
                ("trainable", pa.bool_()),
                ("reward", pa.float64()),
                ("reward_valid", pa.bool_()),
                ("segment_index", pa.int32()),
                ("role", pa.string()),
                ("weight", pa.float64()),
                ("policy_name", pa.string()),
                ("lineage", pa.string()),
                ("ids", pa.list_(pa.uint32())),
                ("sampled", pa.list_(pa.uint8())),
                ("loss_mask", pa.list_(pa.uint8())),
                ("logprobs", pa.list_(pa.float32())),
                ("versions", pa.list_(pa.int32())),
                ("record", pa.string()),
            ]
        )


def _rows(stored: StoredTrajectory) -> Iterator[dict[str, Any]]:
    summary, record = stored.summary, stored.record
    row: dict[str, Any] = {
        "run_id": _utf8(record.run_id),
        "rollout_id": stored.rollout_id,
        "group_id": _utf8(summary.group_id),
        "sample_index": summary.sample_index,
        "task_id": _utf8(summary.task_id),
        "status": str(summary.status),
        "trainable": summary.trainable,
        "reward": summary.reward,
        "reward_valid": summary.reward_valid,
        "policy_name": _utf8(summary.policy_name),
        "lineage": _utf8(summary.lineage),
        "record": json_text(record.model_dump(mode="json")),
    }
    if not record.segments:
        yield row
    for segment, tokens in zip(record.segments, stored.tokens, strict=True):
        yield {
            **row,
            "segment_index": segment.segment_index,
            "role": segment.role.value,
            "weight": segment.weight,
            **_arrays(tokens),
            "versions": token_versions(segment),
        }
        row["record"] = None


def _arrays(tokens: SegmentTokens) -> dict[str, Any]:
    return {
        "ids": tokens.ids,
        "sampled": tokens.sampled,
        "loss_mask": tokens.loss_mask,
        "logprobs": [None if np.isnan(value) else value for value in tokens.logprobs.tolist()],
    }


def _utf8(text: str) -> str:
    """`text` with what no UTF-8 can hold written as an escape; `record` has it as it was."""
    return text.encode("utf-8", "backslashreplace").decode()
