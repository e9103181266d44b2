"""A committed trajectory as it was read: its columns stay compressed until they are asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from hpcroll.contract import RolloutRef, SegmentTokens, Status, Trajectory
from hpcroll.errors import ShardError
from hpcroll.shards.format.codec import Summary, read_record, read_summary, read_tokens
from hpcroll.shards.format.frames import FrameKind, Header
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


_FRAMES = {
    Column.TOKENS: FrameKind.TOKENS,
    Column.RECORD: FrameKind.RECORD,
    Column.TEXT: FrameKind.TEXT,
}
ALL_COLUMNS = frozenset(Column)


def frames_of(columns: Collection[Column]) -> frozenset[FrameKind]:
    """The frames that hold `columns`, the summary's included."""
    return frozenset({FrameKind.SUMMARY, *(_FRAMES[column] for column in columns)})


class Source(Protocol):
    """The columns of one committed record, decoded when asked for; each level has its own.

    Raises `ShardCorruptError` where the bytes are not as written.
    """

    def summary(self) -> Summary: ...

    def tokens(self) -> tuple[SegmentTokens, ...]:
        """One per segment, read-only."""
        ...

    def record(self, *, text: bool) -> TrajectoryRecord:
        """The record; its calls hold messages and replies only with `text`."""
        ...


@dataclass(frozen=True, slots=True)
class RecordBytes:
    """A level-0 record: its header, and its bytes at least up to the columns that are asked for."""

    header: Header
    data: bytes

    def summary(self) -> Summary:
        return read_summary(self.header, self.data)

    def tokens(self) -> tuple[SegmentTokens, ...]:
        return read_tokens(self.header, self.summary(), self.data)

    def record(self, *, text: bool) -> TrajectoryRecord:
        return read_record(self.header, self.data, text=text)


@dataclass(slots=True)
class StoredTrajectory:
    """One committed record. `tokens` and `record` decode on first use and raise `ShardCorruptError` where
    the bytes are not as written (a reader has checked those that it was asked for)."""

    place: Place
    ref: RolloutRef
    attempt: int
    columns: frozenset[Column]
    source: Source = field(repr=False)
    _summary: Summary | None = field(default=None, repr=False)
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
        if self._summary is None:
            self._summary = self.source.summary()
        return self._summary

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

    def trajectory(self) -> Trajectory:
        """Record and token arrays as they were appended, given that every column was read."""
        for column in Column:
            self._require(column)
        return Trajectory(self.record, self.tokens)

    def _require(self, column: Column) -> None:
        if column not in self.columns:
            raise ShardError(
                f"rollout {self.rollout_id}: column {column} was not read; add it to the columns of open_run"
            )


def stored_record(place: Place, header: Header, columns: frozenset[Column], data: bytes) -> StoredTrajectory:
    """The level-0 record of `header` at `place`."""
    return StoredTrajectory(place, header.ref, header.attempt, columns, RecordBytes(header, data))
