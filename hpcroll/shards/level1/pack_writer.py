"""Writes the data file of one pack, block by block; nobody sees it before a manifest names it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcroll.fs.atomic import fsync_directory, write_all
from hpcroll.shards.level1.block import parse_block_header
from hpcroll.shards.level1.block_writer import PackedRow, encode_block
from hpcroll.shards.level1.pack_index import BlockPlace, IndexPlace, encode_index, index_columns
from hpcroll.shards.level1.shared import Shared, encode_shared
from hpcroll.shards.level1.table import Columns, decode_table


class PackFileWriter:
    """Memory: one block, and the summaries of all rows. The file is removed unless `finish` was called."""

    def __init__(
        self, path: Path, *, level: int, float16: bool = False, shared: Shared | None = None
    ) -> None:
        """`shared`: what blocks may refer to; it is written before the first and after the last of them."""
        self.path = path
        self.rows = 0
        self.size_bytes = 0
        self._level = level
        self._float16 = float16
        self._shared = shared or Shared()
        self._shared_block = encode_shared(self._shared) if self._shared else b""
        self._tables: list[Columns] = []
        self._blocks: list[BlockPlace] = []
        self._finished = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if not self._finished:
            self.path.unlink(missing_ok=True)

    def add(self, rows: Sequence[PackedRow]) -> None:
        """Writes one block."""
        if not self._blocks:
            self._write_shared()
        block, table = encode_block(rows, level=self._level, float16=self._float16, shared=self._shared)
        self._tables.append(decode_table(table))
        self.rows += len(rows)
        self._write_block(block, len(rows))

    def finish(self) -> IndexPlace:
        """Writes the index; the whole file is durable on return."""
        self._write_shared()
        data, place = encode_index(index_columns(self._tables, self._blocks), self.size_bytes)
        self._write(data)
        os.fsync(self._descriptor)
        fsync_directory(self.path.parent)
        self._finished = True
        return place

    def _write_shared(self) -> None:
        if self._shared_block:
            self._write_block(self._shared_block, 0)

    def _write_block(self, block: bytes, rows: int) -> None:
        header = parse_block_header(block)
        assert header is not None, "what was just encoded has a sound header"
        self._blocks.append(BlockPlace(self.size_bytes, len(block), rows, header.prefix_bytes))
        self._write(block)

    def _write(self, data: bytes) -> None:
        write_all(self._descriptor, data)
        self.size_bytes += len(data)
