"""Writes the data file of one pack, block by block; nobody sees it before a manifest names it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcroll.fs.atomic import fsync_directory, write_all
from hpcroll.shards.level1.block import BlockKind, parse_block_header
from hpcroll.shards.level1.block_writer import PackedRow, encode_block
from hpcroll.shards.level1.pack_index import BlockPlace, IndexPlace, encode_index, index_columns
from hpcroll.shards.level1.table import Columns, decode_table


class PackFileWriter:
    """Memory: one block, and the summaries of all rows. The file is removed unless `finish` was called."""

    def __init__(self, path: Path, *, level: int, float16: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.size_bytes = 0
        self._level = level
        self._float16 = float16
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
        block, table = encode_block(rows, level=self._level, float16=self._float16)
        header = parse_block_header(block)
        assert header is not None, "what was just encoded has a sound header"
        logprobs = header.frame(BlockKind.LOGPROBS)
        assert logprobs is not None, "every block has log-probabilities"
        self._blocks.append(BlockPlace(self.size_bytes, len(block), len(rows), logprobs.end))
        self._tables.append(decode_table(table))
        self.rows += len(rows)
        self._write(block)

    def finish(self) -> IndexPlace:
        """Writes the index; the whole file is durable on return."""
        data, place = encode_index(index_columns(self._tables, self._blocks), self.size_bytes)
        self._write(data)
        os.fsync(self._descriptor)
        fsync_directory(self.path.parent)
        self._finished = True
        return place

    def _write(self, data: bytes) -> None:
        write_all(self._descriptor, data)
        self.size_bytes += len(data)
