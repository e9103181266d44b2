"""Rows of an index one by one, as the objects that readers work with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """The rows of `columns`. What is asked for first is rearranged once, for all rows: from then on a row
    costs one call of numpy and not one per column."""

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
            for incarnation, index, offset, segment, ordinal, attempt in self._identity[first:last].tolist()
        ]

    def summaries(self, first: int, last: int) -> list[Summary]:
        """Those of rows [first, last), as the level-0 records had them."""
        ends: list[int] = self._columns.first_segment[first : last + 1].tolist()
        segments: list[tuple[Any, ...]] = self._segment[ends[0] : ends[-1]].tolist()
        found, begin = [], 0
        for row, end in zip(self._summary[first:last].tolist(), ends[1:], strict=True):
            found.append(self._one(row, segments[begin : end - ends[0]]))
            begin = end - ends[0]
        return found

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
        lengths, weights, low, high, trained, sampled = zip(*segments, strict=True) if segments else _NONE
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

    @cached_property
    def _identity(self) -> NDArray[Any]:
        return self._rearranged(_IDENTITY)

    @cached_property
    def _summary(self) -> NDArray[Any]:
        return self._rearranged(_SUMMARY)

    @cached_property
    def _segment(self) -> NDArray[Any]:
        return self._rearranged(_SEGMENT)

    def _rearranged(self, names: Sequence[str]) -> NDArray[Any]:
        columns = {name: getattr(self._columns, name) for name in names}
        first = columns[names[0]]
        table = np.empty(len(first), [(name, column.dtype) for name, column in columns.items()])
        for name, column in columns.items():
            table[name] = column
        return table


_NONE: tuple[tuple[Any, ...], ...] = ((),) * len(_SEGMENT)
