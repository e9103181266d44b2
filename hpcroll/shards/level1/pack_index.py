"""The index at a pack's end: the rows of all blocks, and where each block lies.

After the last block: one zstd frame with a table (the columns of `rows`, and per block `block_offset`,
`block_bytes`, `block_rows` and `block_prefix`, the bytes up to the end of its log-probabilities); then the
trailer: 8s magic "hpcrpack", Q offset, Q bytes and Q xxh3-64 of the index, Q xxh3-64 of the trailer so far.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.compression import compress, decompress
from hpcroll.shards.level1.rows import RowColumns, join_rows
from hpcroll.shards.level1.table import Columns, decode_table, encode_table

_MAGIC = b"hpcrpack"
_TRAILER = struct.Struct("<8sQQQ")
_CHECKSUM = struct.Struct("<Q")
_RAW_BYTES = struct.Struct("<Q")
TRAILER_BYTES = _TRAILER.size + _CHECKSUM.size
_INDEX_LEVEL = 3


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block lies in its pack; `prefix_bytes` hold its header, summaries, tokens and
    log-probabilities."""

    offset: int
    size_bytes: int
    rows: int
    prefix_bytes: int


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """Where the index lies in a pack, and what its bytes hash to."""

    offset: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class PackIndex:
    """`rows`, and of B blocks: where they lie. `first_row` int64 (B + 1,)."""

    rows: RowColumns
    block_offset: NDArray[np.uint64]
    block_bytes: NDArray[np.uint64]
    block_prefix: NDArray[np.uint64]
    first_row: NDArray[np.int64]

    @classmethod
    def of(cls, columns: Columns) -> PackIndex:
        """The index of a decoded table; raises `ShardCorruptError` where columns are missing."""
        try:
            first_row = np.zeros(len(columns["block_rows"]) + 1, np.int64)
            np.cumsum(columns["block_rows"], out=first_row[1:])
            return cls(
                RowColumns.of(columns),
                columns["block_offset"],
                columns["block_bytes"],
                columns["block_prefix"],
                first_row,
            )
        except KeyError as error:
            raise ShardCorruptError(f"the index of a pack has no column {error}") from error


def index_columns(tables: Sequence[Columns], blocks: Sequence[BlockPlace]) -> Columns:
    """The columns of the index of `blocks`, whose rows are `tables`."""
    return {
        **join_rows(tables),
        "block_offset": np.array([block.offset for block in blocks], np.uint64),
        "block_bytes": np.array([block.size_bytes for block in blocks], np.uint64),
        "block_rows": np.array([block.rows for block in blocks], np.uint32),
        "block_prefix": np.array([block.prefix_bytes for block in blocks], np.uint64),
    }


def encode_index(columns: Columns, offset: int) -> tuple[bytes, IndexPlace]:
    """Index and trailer, to be written at `offset`, and where the index then lies."""
    raw = encode_table(columns)
    stored = _RAW_BYTES.pack(len(raw)) + compress(raw, _INDEX_LEVEL)
    place = IndexPlace(offset, len(stored), xxhash.xxh3_64_intdigest(stored))
    trailer = _TRAILER.pack(_MAGIC, place.offset, place.size_bytes, place.checksum)
    return stored + trailer + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(trailer)), place


def parse_trailer(data: bytes) -> IndexPlace | None:
    """Where the index lies, from a pack's last bytes; None where they are no sound trailer."""
    if len(data) != TRAILER_BYTES or not data.startswith(_MAGIC):
        return None
    (digest,) = _CHECKSUM.unpack_from(data, _TRAILER.size)
    if xxhash.xxh3_64_intdigest(data[: _TRAILER.size]) != digest:
        return None
    return IndexPlace(*_TRAILER.unpack_from(data)[1:])


def decode_index(stored: memoryview, place: IndexPlace) -> PackIndex | None:
    """The index; None where its bytes are not as written."""
    if len(stored) != place.size_bytes or xxhash.xxh3_64_intdigest(stored) != place.checksum:
        return None
    (raw_bytes,) = _RAW_BYTES.unpack_from(stored)
    raw = decompress(stored[_RAW_BYTES.size :], raw_bytes)
    return PackIndex.of(decode_table(raw))
