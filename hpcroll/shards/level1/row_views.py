"""Rows of an index one by one, as the objects that readers work with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import isnan
from typing import Any

from hpcroll.contract import RolloutRef
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.level1.rows import HAS_REWARD, NOT_SAID, REWARD_VALID, TRAINABLE, RowColumns

_IDENTITY = ("incarnation", "shard_index", "offset", "segment", "ordinal", "attempt")
_SUMMARY = (
    "incarnation",
    "group",
    "group_size",
    "sample_index",
    "task",
    "status",
    "flags",
    "reward",
    "rollout_weight",
    "policy_name",
    "lineage",
    "stop_reason",
    "run_s",
)
_SEGMENT = ("lengths", "weights", "version_low", "version_high", "trained", "sampled")


class RowViews:
    """The rows of `columns`: a call costs a little per column, and less than that for each row."""

    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self._shards: dict[tuple[int, int], ShardName] = {}
        self._segment_names: dict[int, str] = {}

    def identities(self, first: int, last: int) -> list[tuple[Place, RolloutRef, int]]:
        """Place, rollout and attempt of rows [first, last)."""
        return [
            (
                Place(self._shard(incarnation, index), offset),
                RolloutRef(self._segment_name(segment), ordinal),
                attempt,
            )
            for incarnation, index, offset, segment, ordinal, attempt in zip(
                *self._values(_IDENTITY, first, last), strict=True
            )
        ]

    def summaries(self, first: int, last: int) -> list[Summary]:
        """Those of rows [first, last), as the level-0 records had them."""
        ends: list[int] = self._columns.first_segment[first : last + 1].tolist()
        skipped = ends[0]
        segments = self._values(_SEGMENT, skipped, ends[-1])
        return [
            self._one(row, [tuple(values[start - skipped : end - skipped]) for values in segments])
            for row, (start, end) in zip(
                zip(*self._values(_SUMMARY, first, last), strict=True), pairwise(ends), strict=True
            )
        ]

    def _one(self, row: tuple[Any, ...], segments: Sequence[tuple[Any, ...]]) -> Summary:
        (
            incarnation,
            group,
            group_size,
            sample_index,
            task,
            status,
            flags,
            reward,
            weight,
            policy_name,
            lineage,
            stop_reason,
            run_s,
        ) = row
        lengths, weights, low, high, trained, sampled = segments
        text = self._texts
        return Summary(
            text[incarnation],
            text[group],
            group_size,
            sample_index,
            text[task],
            text[status],
            flags & TRAINABLE != 0,
            reward if flags & HAS_REWARD else None,
            flags & REWARD_VALID != 0,
            weight,
            text[policy_name],
            text[lineage],
            lengths,
            weights,
            low,
            high,
            () if NOT_SAID in trained else trained,
            () if NOT_SAID in sampled else sampled,
            text[stop_reason],
            None if isnan(run_s) else run_s,
        )

    def _shard(self, incarnation: int, index: int) -> ShardName:
        name = self._shards.get((incarnation, index))
        if name is None:
            name = ShardName(self._columns.strings[incarnation], index)
            self._shards[incarnation, index] = name
        return name

    def _segment_name(self, number: int) -> str:
        name = self._segment_names.get(number)
        if name is None:
            name = self._segment_names[number] = f"{number:016x}"
        return name

    @cached_property
    def _texts(self) -> list[str]:
        """The strings, decoded once; a summary needs seven of them."""
        return self._columns.strings.texts()

    def _values(self, names: Sequence[str], first: int, last: int) -> list[list[Any]]:
        """Entries [first, last) of each of the columns `names`."""
        return [getattr(self._columns, name)[first:last].tolist() for name in names]
