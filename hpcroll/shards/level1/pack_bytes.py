"""The bytes of a pack's data file, and the blocks that stand in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.buffers import take_buffer
from hpcroll.shards.level1.block import (
    BLOCK_HEADER_BYTES_MOST,
    BLOCK_MAGIC_PREFIX,
    BlockHeader,
    BlockKind,
    check_frame,
    open_block_frame,
    parse_block_header,
)
from hpcroll.shards.level1.pack_index import BlockPlace, PackIndex, index_columns
from hpcroll.shards.level1.table import Columns, decode_table

_SEARCH_BYTES = 1 << 20


class PackBytes:
    """A data file opened for reading; raises `OSError` where it is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Safe to call again. Where the mount is gone, closing says so, which nobody needs to know."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                os.close(descriptor)

    def read(self, offset: int, length: int) -> memoryview:
        """The `length` bytes at `offset`, fewer where the file ends before."""
        if offset < 0:
            return memoryview(b"")
        length = max(0, min(length, self.size - offset))
        # An aligned buffer that is not zeroed: reading into it is several times as fast as into bytes.
        buffer = take_buffer(length).data
        filled = 0
        while filled < length:
            count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            if not count:
                break
            filled += count
        return buffer[:filled]

    def blocks(self) -> Iterator[tuple[int, BlockHeader]]:
        """Every sound block header with its offset, damaged stretches passed over."""
        offset: int | None = 0
        while offset is not None and offset < self.size:
            header = parse_block_header(self.read(offset, BLOCK_HEADER_BYTES_MOST))
            if header is None:
                offset = self._next_block_after(offset)
            else:
                yield offset, header
                offset += header.block_bytes

    def _next_block_after(self, offset: int) -> int | None:
        position = offset + 1
        while position < self.size:
            chunk = bytes(self.read(position, _SEARCH_BYTES))
            hit = chunk.find(BLOCK_MAGIC_PREFIX)
            while hit >= 0:
                if parse_block_header(self.read(position + hit, BLOCK_HEADER_BYTES_MOST)) is not None:
                    return position + hit
                hit = chunk.find(BLOCK_MAGIC_PREFIX, hit + 1)
            position += max(1, len(chunk) - len(BLOCK_MAGIC_PREFIX) + 1)
        return None


def rebuild_index(file: PackBytes) -> PackIndex:
    """The index of the blocks whose header and summaries are as written."""
    tables: list[Columns] = []
    blocks: list[BlockPlace] = []
    for offset, header in file.blocks():
        table = _summaries(file, offset, header) if header.rows else None
        if table is not None:
            tables.append(table)
        if table is not None or not header.rows:
            blocks.append(BlockPlace(offset, header.block_bytes, header.rows, header.prefix_bytes))
    return PackIndex.of(index_columns(tables, blocks))


def _summaries(file: PackBytes, offset: int, header: BlockHeader) -> Columns | None:
    frame = header.frame(BlockKind.SUMMARIES)
    if frame is None:
        return None
    where = f"{file.path}@{offset}"
    stored = file.read(offset + frame.start, frame.stored_bytes)
    try:
        check_frame(frame, stored, where)
        return decode_table(open_block_frame(frame, stored, where))
    except ShardCorruptError:
        return None
