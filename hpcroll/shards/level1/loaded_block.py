"""One block in memory: checked bytes, decompressed column by column when first asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import ExtraColumn, Flags, Floats, Ids, SegmentTokens
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.columns import read_columns
from hpcroll.shards.format.frames import FrameKind
from hpcroll.shards.level1.block import BlockHeader, BlockKind, Encoding, open_block_frame
from hpcroll.shards.level1.block_writer import ABSENT
from hpcroll.shards.level1.rows import RowColumns

if TYPE_CHECKING:
    from hpcroll.contract import TrajectoryRecord

_BYTES_PER_ID = 4


class LoadedBlock:
    """The frames of a block that were read, and the rows of its pack's index that they belong to."""

    def __init__(
        self,
        header: BlockHeader,
        stored: Mapping[int, memoryview],
        rows: RowColumns,
        first_row: int,
        where: str,
    ) -> None:
        """`stored`: checked frames by kind. `first_row`: of the block, in `rows`."""
        self._header = header
        self._stored = stored
        self._rows = rows
        self._where = where
        own = rows.first_segment[first_row : first_row + header.rows + 1]
        lengths = rows.lengths[own[0] : own[-1]]
        self._first_row = first_row
        self._first_segment = int(own[0])
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._columns: tuple[Ids, Flags, Flags, Floats] | None = None
        self._ragged: dict[int, tuple[NDArray[np.int64], NDArray[np.bool_], bytes]] = {}

    @property
    def kinds(self) -> frozenset[int]:
        """Of the frames that were read."""
        return frozenset(self._stored)

    def has(self, kinds: Collection[int]) -> bool:
        """Whether every frame of `kinds` that the block holds was read."""
        return all(kind in self._stored or self._header.frame(kind) is None for kind in kinds)

    def holds(self, kind: int) -> bool:
        """Whether any row of the block has a frame of `kind`."""
        return self._header.frame(kind) is not None

    def tokens(self, row: int) -> tuple[SegmentTokens, ...]:
        """The token arrays of row `row` of the pack, one per segment: read-only views of the block's."""
        ids, sampled, loss_mask, logprobs = self.columns()
        first, last = (int(self._rows.first_segment[row + i]) - self._first_segment for i in (0, 1))
        start = int(self._ends[first - 1]) if first else 0
        found = []
        for end in self._ends[first:last].tolist():
            own = slice(start, end)
            found.append(SegmentTokens(ids[own], sampled[own], loss_mask[own], logprobs[own]))
            start = end
        return tuple(found)

    def columns(self) -> tuple[Ids, Flags, Flags, Floats]:
        """ids uint32 (N,), sampled uint8 (N,), loss mask uint8 (N,) and log-probabilities float32 (N,) of all
        rows of the block in a row."""
        if self._columns is None:
            self._columns = self._decode_columns()
        return self._columns

    def ragged(self, kind: int, row: int) -> bytes | None:
        """The bytes of level-0 frame `kind` of row `row`; None where it has none."""
        if kind not in self._ragged:
            self._ragged[kind] = self._decode_ragged(kind)
        ends, present, data = self._ragged[kind]
        index = row - self._first_row
        if not present[index]:
            return None
        return data[int(ends[index - 1]) if index else 8 * self._header.rows : int(ends[index])]

    def _decode_columns(self) -> tuple[Ids, Flags, Flags, Floats]:
        total = self._header.tokens
        raw = self._open(BlockKind.TOKENS)
        if len(raw) not in (total * (_BYTES_PER_ID + 1), total * (_BYTES_PER_ID + 2)):
            raise ShardCorruptError(f"{self._where}: {len(raw)} token bytes for {total} tokens")
        ids = np.frombuffer(raw, "<u4", total)
        flags = np.frombuffer(raw, np.uint8, offset=_BYTES_PER_ID * total)
        sampled, loss_mask = flags[:total], flags[-total:] if total else flags
        return ids, sampled, loss_mask, self._decode_logprobs(sampled)

    def _decode_logprobs(self, sampled: Flags) -> Floats:
        frame = self._header.frame(BlockKind.LOGPROBS)
        raw = self._open(BlockKind.LOGPROBS)
        if frame is not None and frame.encoding == Encoding.FLOAT16:
            return _from_float16(raw, sampled, self._where)
        logprobs = np.frombuffer(raw, "<f4")
        if len(logprobs) != self._header.tokens:
            raise ShardCorruptError(
                f"{self._where}: {len(logprobs)} log-probabilities for {self._header.tokens} tokens"
            )
        return logprobs

    def _decode_ragged(self, kind: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], bytes]:
        raw, rows = self._open(kind), self._header.rows
        if len(raw) < 8 * rows:
            raise ShardCorruptError(f"{self._where}: frame {kind} is shorter than its {rows} lengths")
        lengths = np.frombuffer(raw, "<u8", rows)
        present = lengths != ABSENT
        ends = np.cumsum(np.where(present, lengths, 0), dtype=np.int64) + 8 * rows
        if rows and ends[-1] != len(raw):
            raise ShardCorruptError(f"{self._where}: frame {kind} is not as long as its lengths say")
        return ends, present, raw

    def _open(self, kind: int) -> bytes:
        frame, stored = self._header.frame(kind), self._stored.get(kind)
        if frame is None or stored is None:
            raise ShardCorruptError(f"{self._where}: the block has no frame {kind}")
        return open_block_frame(frame, stored, self._where)


def _from_float16(raw: bytes, sampled: Flags, where: str) -> Floats:
    halves, taken = np.frombuffer(raw, "<u2"), sampled.view(np.bool_)
    if len(halves) != np.count_nonzero(taken):
        raise ShardCorruptError(
            f"{where}: {len(halves)} log-probabilities for {np.count_nonzero(taken)} sampled"
        )
    logprobs = np.full(len(sampled), np.nan, np.float32)
    # A table of all 65536 values: numpy converts them one by one, at half the speed.
    logprobs[taken] = _float16_values()[halves]
    logprobs.flags.writeable = False
    return logprobs


@cache
def _float16_values() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)


class PackedSource:
    """The columns of one packed row."""

    __slots__ = ("_block", "_row", "_rows")

    def __init__(self, block: LoadedBlock, rows: RowColumns, row: int) -> None:
        self._block = block
        self._rows = rows
        self._row = row

    def summary(self) -> Summary:
        return self._rows.summary(self._row)

    def tokens(self) -> tuple[SegmentTokens, ...]:
        return self._block.tokens(self._row)

    def record(self, *, text: bool) -> TrajectoryRecord:
        from hpcroll.shards.format.record_json import parse_record

        raw = self._require(FrameKind.RECORD)
        return parse_record(raw, self._require(FrameKind.TEXT) if text else None)

    def extra_columns(self, names: Collection[str] | None) -> dict[str, ExtraColumn]:
        if not self._block.holds(FrameKind.COLUMNS):
            return {}
        return read_columns(self._block.ragged(FrameKind.COLUMNS, self._row), self._require, names)

    def _require(self, kind: int) -> bytes:
        raw = self._block.ragged(kind, self._row)
        if raw is None:
            raise ShardCorruptError(f"rollout {self._rows.ref(self._row)}: its row has no frame {kind}")
        return raw
