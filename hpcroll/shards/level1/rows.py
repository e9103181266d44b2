"""The summaries of packed rows as columns: what the index of a pack and each of its blocks hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import Place
from hpcroll.shards.level1.table import Columns, StringCollector, StringTable

TRAINABLE, REWARD_VALID, HAS_REWARD = 1, 2, 4

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
NOT_SAID = -1


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
        found: NDArray[np.bool_] = (self.flags & TRAINABLE) != 0
        return found

    @property
    def reward_valid(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.flags & REWARD_VALID) != 0
        return found

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Trainable, with a valid reward."""
        both = TRAINABLE | REWARD_VALID
        found: NDArray[np.bool_] = (self.flags & both) == both
        return found


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
            flags=summary.trainable * TRAINABLE
            + summary.reward_valid * REWARD_VALID
            + has_reward * HAS_REWARD,
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
        "trained": summary.trained or [NOT_SAID] * len(summary.lengths),
        "sampled": summary.sampled or [NOT_SAID] * len(summary.lengths),
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
