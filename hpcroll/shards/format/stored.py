"""A committed trajectory as it was read: its columns stay compressed until they are asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from hpcroll.contract import ExtraColumn, RolloutRef, SegmentTokens, Status, Trajectory
from hpcroll.errors import ShardError
from hpcroll.shards.format.codec import Summary, read_extra_columns, read_record, read_summary, read_tokens
from hpcroll.shards.format.frames import FIRST_EXTRA, LAST_EXTRA, FrameKind, Header
from hpcroll.shards.format.place import Place

if TYPE_CHECKING:
    from hpcroll.contract import TrajectoryRecord


class Column(StrEnum):
    """What a reader can ask for besides the summary, which it always has."""

    TOKENS = "tokens"
    RECORD = "record"
    """The record without messages and replies."""
    TEXT = "text"
    """Messages and replies; needs `record`, which it joins."""
    EXTRA = "extra"
    """Optional token columns, which only some records have; see `StoredTrajectory.extra_columns`."""


_FRAMES: dict[Column, tuple[int, ...]] = {
    Column.TOKENS: (FrameKind.TOKENS, FrameKind.LOGPROBS),
    Column.RECORD: (FrameKind.RECORD,),
    Column.TEXT: (FrameKind.TEXT,),
    Column.EXTRA: (FrameKind.COLUMNS, *range(FIRST_EXTRA, LAST_EXTRA + 1)),
}
ALL_COLUMNS = frozenset(Column) - {Column.EXTRA}
"""What a reader gets that does not choose: everything but the optional columns."""


def frames_of(columns: Collection[Column]) -> frozenset[int]:
    """The kinds of the frames that hold `columns`, the summary's included."""
    return frozenset({FrameKind.SUMMARY, *(kind for column in columns for kind in _FRAMES[column])})


class Source(Protocol):
    """The columns of one committed record, decoded when asked for; each level has its own.

    Raises `ShardCorruptError` where the bytes are not as written.
    """

    def summary(self) -> Summary:
        """The same object each time."""
        ...

    def tokens(self) -> tuple[SegmentTokens, ...]:
        """One per segment, read-only."""
        ...

    def record(self, *, text: bool) -> TrajectoryRecord:
        """The record; its calls hold messages and replies only with `text`."""
        ...

    def extra_columns(self, names: Collection[str] | None) -> dict[str, ExtraColumn]:
        """Those of the optional columns `names` (None: all) that the record has, read-only."""
        ...


@dataclass(slots=True)
class RecordBytes:
    """A level-0 record: its header, and its bytes at least up to the columns that are asked for."""

    header: Header
    data: bytes
    _summary: Summary | None = field(default=None, repr=False)

    def summary(self) -> Summary:
        if self._summary is None:
            self._summary = read_summary(self.header, self.data)
        return self._summary

    def tokens(self) -> tuple[SegmentTokens, ...]:
        return read_tokens(self.header, self.summary(), self.data)

    def record(self, *, text: bool) -> TrajectoryRecord:
        return read_record(self.header, self.data, text=text)

    def extra_columns(self, names: Collection[str] | None) -> dict[str, ExtraColumn]:
        return read_extra_columns(self.header, self.data, names)


@dataclass(slots=True)
class StoredTrajectory:
    """One committed record. `tokens` and `record` decode on first use and raise `ShardCorruptError` where
    the bytes are not as written (a reader has checked those that it was asked for)."""

    place: Place
    ref: RolloutRef
    attempt: int
    columns: frozenset[Column]
    source: Source = field(repr=False)
    _tokens: tuple[SegmentTokens, ...] | None = field(default=None, repr=False)
    _record: TrajectoryRecord | None = field(default=None, repr=False)

    @property
    def rollout_id(self) -> str:
        return self.ref.rollout_id

    @property
    def incarnation(self) -> str:
        return self.place.shard.incarnation

    @property
    def summary(self) -> Summary:
        """What filters and packing ask for: reward, status, group, weights, policy versions."""
        return self.source.summary()

    @property
    def reward(self) -> float | None:
        return self.summary.reward

    @property
    def status(self) -> Status:
        return Status(self.summary.status)

    @property
    def trainable(self) -> bool:
        return self.summary.trainable

    @property
    def group_id(self) -> str:
        return self.summary.group_id

    @property
    def tokens(self) -> tuple[SegmentTokens, ...]:
        """The token arrays, one per segment: read-only views of one buffer."""
        self._require(Column.TOKENS)
        if self._tokens is None:
            self._tokens = self.source.tokens()
        return self._tokens

    @property
    def record(self) -> TrajectoryRecord:
        """The record; its calls hold messages and replies only where the column `text` was read."""
        self._require(Column.RECORD)
        if self._record is None:
            self._record = self.source.record(text=Column.TEXT in self.columns)
        return self._record

    def extra_columns(self, names: Collection[str] | None = None) -> dict[str, ExtraColumn]:
        """Those of the optional token columns `names` (None: all) that the record has.

        Each is one array per segment, of the dtype it was written with and shape (T, ...), or one `Ragged`;
        read-only. Needs the column `extra`; decoded at each call.
        """
        self._require(Column.EXTRA)
        return self.source.extra_columns(names)

    def trajectory(self) -> Trajectory:
        """Record and token arrays as they were appended, given that these columns were read.

        The optional columns are left out unless `extra` was read too.
        """
        for column in ALL_COLUMNS:
            self._require(column)
        extra = self.extra_columns() if Column.EXTRA in self.columns else {}
        return Trajectory(self.record, self.tokens, extra)

    def _require(self, column: Column) -> None:
        if column not in self.columns:
            raise ShardError(
                f"rollout {self.rollout_id}: column {column} was not read; add it to the columns of open_run"
            )


def stored_record(place: Place, header: Header, columns: frozenset[Column], data: bytes) -> StoredTrajectory:
    """The level-0 record of `header` at `place`."""
    return StoredTrajectory(place, header.ref, header.attempt, columns, RecordBytes(header, data))
