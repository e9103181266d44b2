"""The summaries of packed rows as columns: what the index of a pack and each of its blocks hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import RolloutRef
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.level1.table import Columns, StringCollector, StringTable

_TRAINABLE, _REWARD_VALID, _HAS_REWARD = 1, 2, 4

_ROW_DTYPES: dict[str, Any] = {
    "segment": np.uint64,
    "ordinal": np.uint32,
    "attempt": np.uint32,
    "incarnation": np.uint32,
    "shard_index": np.uint32,
    "offset": np.uint64,
    "checksum": np.uint64,
    "group": np.uint32,
    "group_size": np.uint32,
    "sample_index": np.uint32,
    "task": np.uint32,
    "status": np.uint32,
    "stop_reason": np.uint32,
    "flags": np.uint8,
    "reward": np.float64,
    "rollout_weight": np.float64,
    "run_s": np.float64,
    "policy_name": np.uint32,
    "lineage": np.uint32,
    "segments": np.uint32,
}
_SEGMENT_DTYPES: dict[str, Any] = {
    "lengths": np.uint32,
    "weights": np.float64,
    "version_low": np.int64,
    "version_high": np.int64,
    "trained": np.int64,
    "sampled": np.int64,
}
_SUMMARY_COLUMNS = (
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
_NOT_SAID = -1


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """R rows and their S segments, row after row. Numbers of `strings` stand for text.

    Shape (R,): `segment` uint64 (of the manifest, its 16 hexadecimal digits as a number), `ordinal` uint32,
    `attempt` uint32; the level-0 entry: `incarnation` (string), `shard_index` uint32, `offset` uint64 in
    bytes, `checksum` uint64 of its record's header; `group` (string), `group_size` uint32, `sample_index`
    uint32, `task` (string), `status`, `stop_reason` (strings), `flags` uint8 (see `trainable`,
    `reward_valid`), `reward` float64 (NaN where there is none), `rollout_weight` float64, `run_s` float64
    (NaN where nothing ran), `policy_name`, `lineage` (strings), `segments` uint32, how many of the S are the
    row's.

    Shape (S,): `lengths` uint32 in tokens, `weights` float64, `version_low` and `version_high` int64 (-1
    where nothing was sampled), `trained` int64 (tokens of the loss mask, -1 where the record does not say),
    `sampled` int64, likewise.
    `first_segment` int64 (R + 1,): where the segments of each row begin.
    """

    strings: StringTable
    segment: NDArray[np.uint64]
    ordinal: NDArray[np.uint32]
    attempt: NDArray[np.uint32]
    incarnation: NDArray[np.uint32]
    shard_index: NDArray[np.uint32]
    offset: NDArray[np.uint64]
    checksum: NDArray[np.uint64]
    group: NDArray[np.uint32]
    group_size: NDArray[np.uint32]
    sample_index: NDArray[np.uint32]
    task: NDArray[np.uint32]
    status: NDArray[np.uint32]
    stop_reason: NDArray[np.uint32]
    flags: NDArray[np.uint8]
    reward: NDArray[np.float64]
    rollout_weight: NDArray[np.float64]
    run_s: NDArray[np.float64]
    policy_name: NDArray[np.uint32]
    lineage: NDArray[np.uint32]
    segments: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    weights: NDArray[np.float64]
    version_low: NDArray[np.int64]
    version_high: NDArray[np.int64]
    trained: NDArray[np.int64]
    sampled: NDArray[np.int64]
    first_segment: NDArray[np.int64]

    @classmethod
    def of(cls, columns: Columns) -> RowColumns:
        """The rows of a decoded table; columns that are not known here are ignored."""
        known = {name: columns[name] for name in (*_ROW_DTYPES, *_SEGMENT_DTYPES)}
        first_segment = np.zeros(len(known["segments"]) + 1, np.int64)
        np.cumsum(known["segments"], out=first_segment[1:])
        return cls(strings=StringTable.of(columns), first_segment=first_segment, **known)

    def __len__(self) -> int:
        return len(self.ordinal)

    @property
    def trainable(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.flags & _TRAINABLE) != 0
        return found

    @property
    def reward_valid(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.flags & _REWARD_VALID) != 0
        return found

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Trainable, with a valid reward."""
        both = _TRAINABLE | _REWARD_VALID
        found: NDArray[np.bool_] = (self.flags & both) == both
        return found

    def ref(self, row: int) -> RolloutRef:
        return RolloutRef(f"{int(self.segment[row]):016x}", int(self.ordinal[row]))

    def place(self, row: int) -> Place:
        """The level-0 entry that the row came from."""
        name = ShardName(self.strings[self.incarnation[row]], int(self.shard_index[row]))
        return Place(name, int(self.offset[row]))

    def group_id(self, row: int) -> str:
        text: str = self.strings[self.group[row]]
        return text

    def summary(self, row: int) -> Summary:
        """The summary as the level-0 record had it."""
        return self.summaries(row, row + 1)[0]

    def summaries(self, first: int, last: int) -> list[Summary]:
        """Those of rows [first, last); much cheaper than one by one."""
        start, ends = int(self.first_segment[first]), self.first_segment[first + 1 : last + 1].tolist()
        own = slice(start, ends[-1])
        text = self.strings
        segments = zip(
            *(_cut(getattr(self, name)[own].tolist(), start, ends) for name in _SEGMENT_DTYPES), strict=True
        )
        rows = zip(*(getattr(self, name)[first:last].tolist() for name in _SUMMARY_COLUMNS), strict=True)
        return [
            Summary(
                text[incarnation],
                text[group],
                group_size,
                sample_index,
                text[task],
                text[status],
                flags & _TRAINABLE != 0,
                reward if flags & _HAS_REWARD else None,
                flags & _REWARD_VALID != 0,
                weight,
                text[policy_name],
                text[lineage],
                lengths,
                weights,
                version_low,
                version_high,
                () if _NOT_SAID in trained else trained,
                () if _NOT_SAID in sampled else sampled,
                text[stop_reason],
                None if isnan(run_s) else run_s,
            )
            for (
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
            ), (lengths, weights, version_low, version_high, trained, sampled) in zip(
                rows, segments, strict=True
            )
        ]

    def identities(self, first: int, last: int) -> list[tuple[Place, RolloutRef, int]]:
        """Place, rollout and attempt of rows [first, last)."""
        names = ("incarnation", "shard_index", "offset", "segment", "ordinal", "attempt")
        columns = [getattr(self, name)[first:last].tolist() for name in names]
        shards = {
            (incarnation, index): ShardName(self.strings[incarnation], index)
            for incarnation, index in zip(columns[0], columns[1], strict=True)
        }
        return [
            (Place(shards[incarnation, index], offset), RolloutRef(f"{segment:016x}", ordinal), attempt)
            for incarnation, index, offset, segment, ordinal, attempt in zip(*columns, strict=True)
        ]


@dataclass(slots=True)
class RowCollector:
    """Rows on their way into a block or an index."""

    _strings: StringCollector = field(default_factory=StringCollector)
    _columns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0

    def add(self, place: Place, header: Header, summary: Summary) -> None:
        """Takes the row of the level-0 record of `header` at `place`."""
        number = self._strings.number
        has_reward = summary.reward is not None
        self._append(
            segment=int(header.ref.segment, 16),
            ordinal=header.ref.ordinal,
            attempt=header.attempt,
            incarnation=number(place.shard.incarnation),
            shard_index=place.shard.index,
            offset=place.offset,
            checksum=header.checksum,
            group=number(summary.group_id),
            group_size=summary.group_size,
            sample_index=summary.sample_index,
            task=number(summary.task_id),
            status=number(summary.status),
            stop_reason=number(summary.stop_reason),
            flags=summary.trainable * _TRAINABLE
            + summary.reward_valid * _REWARD_VALID
            + has_reward * _HAS_REWARD,
            reward=summary.reward if has_reward else np.nan,
            rollout_weight=summary.rollout_weight,
            run_s=summary.run_s if summary.run_s is not None else np.nan,
            policy_name=number(summary.policy_name),
            lineage=number(summary.lineage),
            segments=len(summary.lengths),
        )
        for name, values in _segment_values(summary).items():
            self._columns[name].extend(values)
        self.rows += 1

    def columns(self) -> dict[str, NDArray[Any]]:
        """The rows, as columns for `encode_table`."""
        dtypes = _ROW_DTYPES | _SEGMENT_DTYPES
        numbers = {name: np.array(self._columns[name], dtype) for name, dtype in dtypes.items()}
        return numbers | self._strings.columns()

    def _append(self, **values: Any) -> None:
        for name, value in values.items():
            self._columns[name].append(value)


def _segment_values(summary: Summary) -> dict[str, Sequence[float]]:
    return {
        "lengths": summary.lengths,
        "weights": summary.weights,
        "version_low": summary.version_low,
        "version_high": summary.version_high,
        "trained": summary.trained or [_NOT_SAID] * len(summary.lengths),
        "sampled": summary.sampled or [_NOT_SAID] * len(summary.lengths),
    }


def join_rows(tables: Sequence[Columns]) -> dict[str, NDArray[Any]]:
    """The rows of several tables in one, each distinct string once."""
    strings = StringCollector()
    parts: defaultdict[str, list[NDArray[Any]]] = defaultdict(list)
    for table in tables:
        numbers = np.array([strings.number(text) for text in StringTable.of(table)], np.uint32)
        for name in (*_ROW_DTYPES, *_SEGMENT_DTYPES):
            column = table[name]
            parts[name].append(numbers[column] if name in _TEXT_COLUMNS else column)
    dtypes = _ROW_DTYPES | _SEGMENT_DTYPES
    joined = {
        name: np.concatenate([np.empty(0, dtype), *parts[name]]).astype(dtype, copy=False)
        for name, dtype in dtypes.items()
    }
    return joined | strings.columns()


_TEXT_COLUMNS = frozenset({"incarnation", "group", "task", "status", "stop_reason", "policy_name", "lineage"})


def _cut(values: list[Any], start: int, ends: Sequence[int]) -> list[tuple[Any, ...]]:
    """`values`, of the segments from number `start`, by row; `ends` say where each row's end."""
    bounds = pairwise([0, *(end - start for end in ends)])
    return [tuple(values[begin:end]) for begin, end in bounds]
