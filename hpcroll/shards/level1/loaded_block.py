"""One block in memory: checked bytes, decompressed column by column when first asked for."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hpcroll.contract import ExtraColumn, Floats, Ids, RolloutRef, SegmentTokens
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.buffers import take_buffer
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.columns import read_columns
from hpcroll.shards.format.frames import FrameKind
from hpcroll.shards.format.place import Place
from hpcroll.shards.level1.block import BlockFrame, BlockHeader, BlockKind, Encoding, open_block_frame
from hpcroll.shards.level1.block_writer import ABSENT, REST_COUNT, REST_ENTRY
from hpcroll.shards.level1.dictionary import PackDictionary
from hpcroll.shards.level1.row_views import RowViews
from hpcroll.shards.level1.rows import RowColumns
from hpcroll.shards.level1.shared import Shared
from hpcroll.shards.level1.token_columns import TokenColumns, join_halves, parse_masks

if TYPE_CHECKING:
    from hpcroll.contract import TrajectoryRecord

_BYTES_PER_LENGTH = 8
_FEW_ROWS = 2
"""So many rows are decoded one by one, for a reader that picks some; more cost less all at once."""


class LoadedBlock:
    """The frames of a block that were read, and the rows of its pack's index that they belong to."""

    def __init__(
        self,
        header: BlockHeader,
        stored: Mapping[int, memoryview],
        rows: RowColumns,
        views: RowViews,
        first_row: int,
        where: str,
        *,
        shared: Shared,
    ) -> None:
        """`stored`: checked frames by kind. `first_row`: of the block, in `rows`. `shared`: what those frames
        that say so need."""
        self._header = header
        self._stored = stored
        self._views = views
        self._where = where
        self._shared = shared
        self._first_row = first_row
        self._segments: list[int] = rows.first_segment[first_row : first_row + header.rows + 1].tolist()
        lengths = rows.lengths[self._segments[0] : self._segments[-1]]
        self._bounds: list[int] = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
        self._identities: list[tuple[Place, RolloutRef, int]] | None = None
        self._tokens: TokenColumns | None = None
        self._whole: tuple[Ids, Floats] | None = None
        self._asked = 0
        self._summaries: list[Summary] | None = None
        self._ragged: dict[int, _Ragged] = {}
        self._rest: dict[int, memoryview] | None = None

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

    def identity(self, row: int) -> tuple[Place, RolloutRef, int]:
        """Place, rollout and attempt of row `row` of the pack."""
        if self._identities is None:
            self._identities = self._views.identities(self._first_row, self._first_row + self._header.rows)
        return self._identities[row - self._first_row]

    def summary(self, row: int) -> Summary:
        """The summary of row `row` of the pack."""
        if self._summaries is None:
            self._summaries = self._views.summaries(self._first_row, self._first_row + self._header.rows)
        return self._summaries[row - self._first_row]

    def tokens(self, row: int) -> tuple[SegmentTokens, ...]:
        """The token arrays of row `row` of the pack, one per segment: read-only views of a buffer of the
        block's, or of the row's own where a reader does not begin with the block's first row."""
        columns = self._tokens
        if columns is None:
            columns = self._tokens = self._open_tokens()
        index, skipped = row - self._first_row, self._segments[0]
        bounds = self._bounds[self._segments[index] - skipped : self._segments[index + 1] - skipped + 1]
        self._asked += 1
        if self._whole is None and (index == 0 or self._asked > _FEW_ROWS):
            self._whole = columns.decode(0, self._header.tokens)
        first = 0 if self._whole is not None else bounds[0]
        ids, logprobs = self._whole or columns.decode(first, bounds[-1])
        return tuple(
            SegmentTokens(
                ids[start - first : end - first],
                columns.sampled[start:end],
                columns.loss_mask[start:end],
                logprobs[start - first : end - first],
            )
            for start, end in pairwise(bounds)
        )

    def ragged(self, kind: int, row: int) -> bytes | None:
        """The bytes of level-0 frame `kind` of row `row`; None where it has none."""
        if kind not in self._ragged:
            self._ragged[kind] = _Ragged(self._raw(kind), self._header.rows, f"{self._where}: frame {kind}")
        return self._ragged[kind].value(row - self._first_row)

    def _open_tokens(self) -> TokenColumns:
        ids, logprobs = self._frame(BlockKind.TOKENS), self._frame(BlockKind.LOGPROBS)
        total, vocabulary = self._header.tokens, None
        if ids.encoding == Encoding.CODES:
            vocabulary = self._vocabulary()
        masks = parse_masks(
            self._open(BlockKind.MASKS), self._frame(BlockKind.MASKS).encoding, total, self._where
        )
        middle = None
        if logprobs.encoding != Encoding.FLOAT16:
            middle = self._open(BlockKind.LOGPROBS_MIDDLE)
        return TokenColumns(
            ids=self._open(BlockKind.TOKENS),
            vocabulary=vocabulary,
            masks=masks,
            logprobs=(self._open(BlockKind.LOGPROBS), middle, self._open(BlockKind.LOGPROBS_LOW)),
            total=total,
            where=self._where,
        )

    def _vocabulary(self) -> Ids:
        """The ids that codes stand for, those of the pack first."""
        steps = join_halves(self._open(BlockKind.VOCABULARY))
        common = self._shared.vocabulary if self._frame(BlockKind.VOCABULARY).shared else steps[:0]
        whole = take_buffer(4 * (len(common) + len(steps))).view(np.uint32)
        whole[: len(common)] = common
        steps.cumsum(dtype=np.uint32, out=whole[len(common) :])
        return whole

    def _raw(self, kind: int) -> memoryview:
        """What the rows have of a level-0 kind: a frame of its own, or a part of the rest."""
        if self._header.frame(kind) is not None:
            return self._open(kind)
        if self._rest is None:
            self._rest = _parts(self._open(BlockKind.REST), self._where)
        if kind not in self._rest:
            raise ShardCorruptError(f"{self._where}: the block has no frame {kind}")
        return self._rest[kind]

    def _open(self, kind: int) -> memoryview:
        frame = self._frame(kind)
        return open_block_frame(frame, self._bytes(frame), self._where, self._dictionary(frame))

    def _dictionary(self, frame: BlockFrame) -> PackDictionary | None:
        if not frame.shared or frame.kind == BlockKind.VOCABULARY:
            return None
        found = self._shared.dictionaries.get(frame.kind)
        if found is None:
            raise ShardCorruptError(
                f"{self._where}: frame {frame.kind} needs a dictionary that the pack lacks"
            )
        return found

    def _frame(self, kind: int) -> BlockFrame:
        frame = self._header.frame(kind)
        if frame is None:
            raise ShardCorruptError(f"{self._where}: the block has no frame {kind}")
        return frame

    def _bytes(self, frame: BlockFrame) -> memoryview:
        stored = self._stored.get(frame.kind)
        if stored is None:
            raise ShardCorruptError(f"{self._where}: frame {frame.kind} was not read")
        return stored


class _Ragged:
    """One value of any length per row, or none."""

    def __init__(self, raw: memoryview, rows: int, what: str) -> None:
        if len(raw) < _BYTES_PER_LENGTH * rows:
            raise ShardCorruptError(f"{what} is shorter than its {rows} lengths")
        lengths = np.frombuffer(raw, "<u8", rows)
        self._present = lengths != ABSENT
        self._ends = np.cumsum(np.where(self._present, lengths, 0), dtype=np.int64)
        self._data = raw[_BYTES_PER_LENGTH * rows :]
        if rows and self._ends[-1] != len(self._data):
            raise ShardCorruptError(f"{what} is not as long as its lengths say")

    def value(self, index: int) -> bytes | None:
        if not self._present[index]:
            return None
        start = int(self._ends[index - 1]) if index else 0
        return bytes(self._data[start : int(self._ends[index])])


def _parts(raw: memoryview, where: str) -> dict[int, memoryview]:
    """The parts of the rest, by kind."""
    found, position = {}, REST_COUNT.size
    try:
        (count,) = REST_COUNT.unpack_from(raw)
        start = position + count * REST_ENTRY.size
        for _ in range(count):
            kind, size = REST_ENTRY.unpack_from(raw, position)
            found[kind] = raw[start : start + size]
            position, start = position + REST_ENTRY.size, start + size
    except struct.error as error:
        raise ShardCorruptError(f"{where}: its rest is cut short: {error}") from error
    return found


class PackedSource:
    """The columns of one packed row."""

    __slots__ = ("_block", "_row")

    def __init__(self, block: LoadedBlock, row: int) -> None:
        self._block = block
        self._row = row

    def summary(self) -> Summary:
        return self._block.summary(self._row)

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
            raise ShardCorruptError(
                f"rollout {self._block.identity(self._row)[1]}: its row has no frame {kind}"
            )
        return raw
