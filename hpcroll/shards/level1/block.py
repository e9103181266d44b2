"""The framing of one block: rows of a pack whose columns are compressed together, each checksummed.

Layout, little-endian (docs/reference/shard-format.md):

    8s  magic      b"hpcrblk" and the major version of the format
    H   minor      a newer minor version adds frame kinds, which older readers skip
    H   frames     how many frames follow
    I   rows
    Q   tokens     of all rows together
    Q   body       bytes of all frames together
    then per frame:  I kind, I encoding, Q stored bytes, Q raw bytes, Q xxh3-64 of the stored bytes
    Q   xxh3-64 of everything before

A block can be read without the index of its pack, which is rebuilt from the blocks where it is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from hpcroll.errors import SchemaVersionError, ShardCorruptError
from hpcroll.shards.format.compression import compress
from hpcroll.shards.level1.buffers import decompress

BLOCK_MAGIC_PREFIX = b"hpcrblk"
MAJOR = 1
MINOR = 0
_MAGIC = BLOCK_MAGIC_PREFIX + bytes([MAJOR])
_FIXED = struct.Struct("<8sHHIQQ")
_FRAME = struct.Struct("<IIQQQ")
_CHECKSUM = struct.Struct("<Q")
_MOST_FRAMES = 64
BLOCK_HEADER_BYTES_MOST = _FIXED.size + _MOST_FRAMES * _FRAME.size + _CHECKSUM.size
"""No header is longer, so one read of this many bytes holds any."""


class BlockKind(IntEnum):
    """What a frame of a block holds. Kinds below 256 are those of level-0 records (`FrameKind`): such a frame
    holds Q length of that frame of each row (2^64 - 1: absent), then their bytes. Readers skip kinds that
    they do not know."""

    SUMMARIES = 256
    """A table of the rows, see `hpcroll.shards.level1.rows`."""
    TOKENS = 257
    """ids u32, then sampled u8, then loss mask u8; each for all rows and their segments in a row. The loss
    mask is absent where it equals `sampled`."""
    LOGPROBS = 258
    """Log-probabilities, of the frame's encoding."""
    REST = 259
    """Records and texts, which have much in common: I how many kinds, for each I kind and Q bytes, then for
    each kind what a frame of its own would hold."""


class Encoding(IntEnum):
    """How a frame's numbers are written."""

    PLAIN = 0
    """As the level-0 record has them; log-probabilities as float32."""
    FLOAT16 = 1
    """Log-probabilities of the sampled tokens alone, as float16; those of the others are NaN."""


class BlockFrame(NamedTuple):
    """Where a frame lies within its block, and what its bytes hash to."""

    kind: int
    encoding: int
    start: int
    stored_bytes: int
    raw_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        return self.start + self.stored_bytes


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A block's header, which covers the checksums of its frames."""

    rows: int
    tokens: int
    frames: tuple[BlockFrame, ...]
    header_bytes: int
    block_bytes: int

    def frame(self, kind: int) -> BlockFrame | None:
        """The frame of `kind`; None where the block has none."""
        return next((frame for frame in self.frames if frame.kind == kind), None)


def join_block(rows: int, tokens: int, frames: Mapping[int, tuple[Encoding, bytes]], *, level: int) -> bytes:
    """The block of `frames` (kind: encoding and raw bytes), in their order, compressed at zstd `level`."""
    table, body = b"", []
    for kind, (encoding, raw) in frames.items():
        stored = compress(raw, level)
        table += _FRAME.pack(kind, encoding, len(stored), len(raw), xxhash.xxh3_64_intdigest(stored))
        body.append(stored)
    head = _FIXED.pack(_MAGIC, MINOR, len(frames), rows, tokens, sum(map(len, body))) + table
    return b"".join([head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), *body])


def parse_block_header(data: bytes | memoryview) -> BlockHeader | None:
    """The header that `data` begins with; None where it is short, torn, zeroed or damaged.

    Raises `SchemaVersionError` for a sound header of another major version.
    """
    if len(data) < _FIXED.size:
        return None
    magic, _, count, rows, tokens, body = _FIXED.unpack_from(data)
    end = _FIXED.size + count * _FRAME.size
    if magic[:7] != BLOCK_MAGIC_PREFIX or count > _MOST_FRAMES or len(data) < end + _CHECKSUM.size:
        return None
    (digest,) = _CHECKSUM.unpack_from(data, end)
    if xxhash.xxh3_64_intdigest(data[:end]) != digest:
        return None
    if magic != _MAGIC:
        raise SchemaVersionError(
            f"a block has pack format {magic[7]}, this hpcroll reads {MAJOR}; use the hpcroll that wrote it"
        )
    frames, start = [], end + _CHECKSUM.size
    for kind, encoding, stored, raw, frame_digest in _FRAME.iter_unpack(data[_FIXED.size : end]):
        frames.append(BlockFrame(kind, encoding, start, stored, raw, frame_digest))
        start += stored
    return BlockHeader(rows, tokens, tuple(frames), end + _CHECKSUM.size, end + _CHECKSUM.size + body)


def check_frame(frame: BlockFrame, stored: bytes | memoryview, where: str) -> None:
    """Raises `ShardCorruptError` unless `stored` are the bytes of `frame`."""
    if len(stored) != frame.stored_bytes or xxhash.xxh3_64_intdigest(stored) != frame.checksum:
        raise ShardCorruptError(f"{where}: frame {frame.kind} does not match its checksum")


def open_block_frame(frame: BlockFrame, stored: memoryview, where: str) -> memoryview:
    """The raw bytes of `frame`, whose `stored` bytes were checked."""
    return decompress(stored, frame.raw_bytes, f"{where}: frame {frame.kind}")
