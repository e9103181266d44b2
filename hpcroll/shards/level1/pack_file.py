"""One packed shard, opened for reading: an index of its rows, and blocks that are read when asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.frames import FIRST_EXTRA, LAST_EXTRA, FrameKind
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level1.block import (
    PREFIX,
    BlockHeader,
    BlockKind,
    check_frame,
    parse_block_header,
)
from hpcroll.shards.level1.chain import Manifest
from hpcroll.shards.level1.loaded_block import LoadedBlock, PackedSource
from hpcroll.shards.level1.pack_bytes import PackBytes, rebuild_index
from hpcroll.shards.level1.pack_index import (
    TRAILER_BYTES,
    IndexPlace,
    PackIndex,
    decode_index,
    parse_trailer,
)
from hpcroll.shards.level1.row_views import RowViews
from hpcroll.shards.level1.rows import RowColumns
from hpcroll.shards.level1.shared import Shared, decode_shared

_KINDS: dict[Column, tuple[int, ...]] = {
    Column.TOKENS: PREFIX[1:],
    Column.RECORD: (BlockKind.REST, FrameKind.RECORD),
    Column.TEXT: (BlockKind.REST, FrameKind.TEXT),
    Column.EXTRA: (FrameKind.COLUMNS, *range(FIRST_EXTRA, LAST_EXTRA + 1)),
}
_PREFIX = frozenset(PREFIX)


@cache
def _kinds_of(columns: frozenset[Column]) -> frozenset[int]:
    """The kinds of the frames that hold `columns`."""
    return frozenset(kind for column in columns for kind in _KINDS[column])


class OpenPack:
    """A pack opened for reading; keep it open while rows are read. One thread at a time.

    Rows are numbered from 0 in file order, and those of one group stand together. Memory: the index, and
    one block. Raises `OSError` where the file is gone.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        """`manifest` is what the chain says of the file; without it the file's own trailer is believed.

        A damaged index is rebuilt from the blocks, and `index_damaged` is true then.
        """
        self.path = path
        self._file = PackBytes(path)
        try:
            index = self._read_index(manifest)
            self.index_damaged = index is None
            self._index = index or rebuild_index(self._file)
        except BaseException:
            self._file.close()
            raise
        self.rows: RowColumns = self._index.rows
        """The index: a numpy array per column, one entry per row."""
        self._views = RowViews(self.rows)
        self._first_rows: list[int] = self._index.first_row.tolist()
        self._loaded: tuple[int, frozenset[Column], LoadedBlock] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def close(self) -> None:
        """Closes the file; arrays that were handed out stay. Safe to call again."""
        self._file.close()
        self._loaded = None

    def place(self, row: int) -> Place:
        """The level-0 entry that the row came from, which names it on both levels."""
        return self._views.identities(row, row + 1)[0][0]

    def ref(self, row: int) -> RolloutRef:
        return self._views.identities(row, row + 1)[0][1]

    def read(self, row: int, columns: Collection[Column]) -> StoredTrajectory:
        """The row's trajectory with `columns`, whose bytes are checked now.

        Cheap for rows of one block one after the other: the block that was read last is kept. The arrays of
        a trajectory are views of its block's arrays. Raises `ShardCorruptError` where the bytes of the block
        are not as written; other blocks are not concerned.
        """
        chosen = columns if isinstance(columns, frozenset) else frozenset(columns)
        block = self.load(self.block_of(row), chosen)
        place, ref, attempt = block.identity(row)
        return StoredTrajectory(place, ref, attempt, chosen, PackedSource(block, row))

    def block_of(self, row: int) -> int:
        """The number of the block that holds `row`."""
        return bisect_right(self._first_rows, row) - 1

    def blocks(self) -> Iterator[range]:
        """The rows of each block that has any, in file order."""
        return (range(start, end) for start, end in pairwise(self._first_rows) if start < end)

    def load(self, block: int, columns: frozenset[Column]) -> LoadedBlock:
        """Block number `block` with `columns`; raises `ShardCorruptError` as `read` does."""
        loaded = self._loaded
        if loaded is None or loaded[0] != block or loaded[1] != columns:
            loaded = self._loaded = (block, columns, self._load(block, columns))
        return loaded[2]

    def row_of(self, place: Place) -> int | None:
        """The row that came from the level-0 entry at `place`; None where this pack does not hold it."""
        number = self.rows.strings.number(place.shard.incarnation)
        if number is None:
            return None
        found = self._find(
            self._places,
            (self.rows.incarnation, self.rows.shard_index, self.rows.offset),
            (number, place.shard.index, place.offset),
        )
        return found

    def row_of_rollout(self, ref: RolloutRef) -> int | None:
        """The row of rollout `ref`; None where this pack does not hold it."""
        return self._find(
            self._refs, (self.rows.segment, self.rows.ordinal), (int(ref.segment, 16), ref.ordinal)
        )

    def rows_of_group(self, group_id: str) -> NDArray[np.int64]:
        """The rows of a group in this pack, ascending; empty where it holds none."""
        number = self.rows.strings.number(group_id)
        if number is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.rows.group == number)

    def rows_of_shard(self, name: ShardName) -> NDArray[np.int64]:
        """The rows that came from one level-0 shard, ascending; empty where there are none."""
        number = self.rows.strings.number(name.incarnation)
        if number is None:
            return np.empty(0, np.int64)
        return np.flatnonzero((self.rows.incarnation == number) & (self.rows.shard_index == name.index))

    def damage(self) -> list[str]:
        """Reads every byte; what does not match its checksum, one line each. Empty: all is as written."""
        found = [f"{self.path}: its index or trailer is damaged, or not as its manifest says"]
        found *= self.index_damaged or not self._is_covered()
        for number in range(len(self._index.block_offset)):
            offset, size = int(self._index.block_offset[number]), int(self._index.block_bytes[number])
            try:
                self._check_block(offset, size)
            except ShardCorruptError as error:
                found.append(str(error))
        return found

    @cached_property
    def _shared(self) -> Shared:
        """What the blocks share, from the first copy that is as written."""
        for number in np.flatnonzero(np.diff(self._index.first_row) == 0).tolist():
            offset = int(self._index.block_offset[number])
            where = f"{self.path}@{offset}"
            data = self._file.read(offset, int(self._index.block_bytes[number]))
            try:
                return decode_shared(self._header(data, number, where), data, where)
            except ShardCorruptError:
                continue
        raise ShardCorruptError(f"{self.path}: what its blocks share is damaged in every copy")

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        rows = self.rows
        order: NDArray[np.int64] = np.lexsort((rows.offset, rows.shard_index, rows.incarnation))
        return order

    @cached_property
    def _refs(self) -> NDArray[np.int64]:
        order: NDArray[np.int64] = np.lexsort((self.rows.ordinal, self.rows.segment))
        return order

    @staticmethod
    def _find(
        order: NDArray[np.int64], keys: tuple[NDArray[np.unsignedinteger], ...], wanted: tuple[int, ...]
    ) -> int | None:
        """The row whose `keys` are `wanted`, by bisection of `order`, which sorts the rows by them."""
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            row = order[middle]
            if tuple(int(key[row]) for key in keys) < wanted:
                low = middle + 1
            else:
                high = middle
        if low == len(order):
            return None
        row = int(order[low])
        return row if tuple(int(key[row]) for key in keys) == wanted else None

    def _load(self, number: int, columns: frozenset[Column]) -> LoadedBlock:
        kinds = _kinds_of(columns)
        if self._loaded is not None and self._loaded[0] == number:
            if self._loaded[2].has(kinds):
                return self._loaded[2]
            kinds |= self._loaded[2].kinds  # so that taking turns with columns does not read it each time
        self._loaded = None  # its memory can then be used again
        offset = int(self._index.block_offset[number])
        where = f"{self.path}@{offset}"
        prefix_only = kinds <= _PREFIX
        size = int((self._index.block_prefix if prefix_only else self._index.block_bytes)[number])
        data = self._file.read(offset, size)
        header = self._header(data, number, where)
        stored = {}
        for frame in header.frames:
            if frame.kind in kinds:
                part = data[frame.start : frame.end]
                check_frame(frame, part, where)
                stored[frame.kind] = part
        needed = any(frame.shared for frame in header.frames if frame.kind in stored)
        shared = self._shared if needed else Shared()
        return LoadedBlock(
            header, stored, self.rows, self._views, self._first_rows[number], where, shared=shared
        )

    def _header(self, data: memoryview, number: int, where: str) -> BlockHeader:
        header = parse_block_header(data)
        rows = int(self._index.first_row[number + 1] - self._index.first_row[number])
        if header is None or header.rows != rows or header.block_bytes != self._index.block_bytes[number]:
            raise ShardCorruptError(f"{where}: the block's header is damaged")
        return header

    def _check_block(self, offset: int, size: int) -> None:
        where = f"{self.path}@{offset}"
        data = self._file.read(offset, size)
        header = parse_block_header(data)
        if header is None or header.block_bytes != size:
            raise ShardCorruptError(f"{where}: the block's header is damaged")
        for frame in header.frames:
            check_frame(frame, data[frame.start : frame.end], where)

    def _is_covered(self) -> bool:
        """Whether every byte of the file belongs to a block, the index or the trailer."""
        ends = np.cumsum(self._index.block_bytes, dtype=np.int64).tolist()
        return (
            self._place is not None
            and [0, *ends] == [*self._index.block_offset.tolist(), self._place.offset]
            and self._place.offset + self._place.size_bytes + TRAILER_BYTES == self._file.size
        )

    def _read_index(self, manifest: Manifest | None) -> PackIndex | None:
        trailer = self._file.read(self._file.size - TRAILER_BYTES, TRAILER_BYTES)
        self._place = place = parse_trailer(bytes(trailer))
        if manifest is not None:
            place = IndexPlace(manifest.index_offset, manifest.index_bytes, manifest.index_checksum)
            self._place = place if place == self._place else None
        if place is None:
            return None
        return decode_index(self._file.read(place.offset, place.size_bytes), place)
