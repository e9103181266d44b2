"""The framing of one block: rows of a pack whose columns are compressed together, each checksummed.

Layout, little-endian (docs/reference/shard-format.md):

    8s  magic      b"hpcrblk" and the major version of the format
    H   minor      a newer minor version adds frame kinds, which older readers skip
    H   frames     how many frames follow
    I   rows
    Q   tokens     of all rows together
    Q   body       bytes of all frames together
    then per frame:  I kind, H encoding, H shared, Q stored bytes, Q raw bytes, Q xxh3-64 of the stored bytes
    Q   xxh3-64 of everything before

A frame whose stored and raw bytes are equally many stands as it is, any other is one zstd frame. A block can
be read without the index of its pack, which is rebuilt from the blocks where it is damaged; frames with
`shared` = 1 need what the blocks of their pack share (`hpcroll.shards.level1.shared`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from hpcroll.errors import SchemaVersionError, ShardCorruptError
from hpcroll.shards.format.compression import compress, decompress
from hpcroll.shards.level1.dictionary import PackDictionary

BLOCK_MAGIC_PREFIX = b"hpcrblk"
MAJOR = 1
MINOR = 0
_MAGIC = BLOCK_MAGIC_PREFIX + bytes([MAJOR])
_FIXED = struct.Struct("<8sHHIQQ")
_FRAME = struct.Struct("<IHHQQQ")
_CHECKSUM = struct.Struct("<Q")
_MOST_FRAMES = 64
_WORTH = 31 / 32
"""A frame that zstd does not make smaller than this stands as it is, which costs a reader nothing."""
BLOCK_HEADER_BYTES_MOST = _FIXED.size + _MOST_FRAMES * _FRAME.size + _CHECKSUM.size
"""No header is longer, so one read of this many bytes holds any."""


class BlockKind(IntEnum):
    """What a frame of a block holds. Kinds below 256 are those of level-0 records (`FrameKind`): such a frame
    holds Q length of that frame of each row (2^64 - 1: absent), then their bytes. Readers skip kinds that
    they do not know."""

    SUMMARIES = 256
    """A table of the rows, see `hpcroll.shards.level1.rows`."""
    TOKENS = 257
    """ids of all rows and their segments in a row, of the frame's encoding."""
    LOGPROBS = 258
    """The highest byte of each log-probability."""
    REST = 259
    """Records and texts, which have much in common: I how many kinds, for each I kind and Q bytes, then for
    each kind what a frame of its own would hold."""
    VOCABULARY = 260
    """The ids that codes stand for, ascending: low halves u16 of their differences, then high halves. With
    `shared`, they follow those of the pack's vocabulary."""
    MASKS = 261
    """sampled, then the loss mask, which is absent where it equals `sampled`."""
    LOGPROBS_MIDDLE = 262
    """The second byte of each log-probability; absent with FLOAT16."""
    LOGPROBS_LOW = 263
    """The other bytes of each log-probability: u16, or u8 with FLOAT16."""
    SHARED_VOCABULARY = 264
    """Of a block without rows: the ids that codes of all blocks stand for, low halves u16, then high."""
    SHARED_TOKENS = 265
    """Of a block without rows: the dictionary of TOKENS frames."""
    SHARED_REST = 266
    """Of a block without rows: the dictionary of REST frames."""


PREFIX = (
    BlockKind.SUMMARIES,
    BlockKind.VOCABULARY,
    BlockKind.TOKENS,
    BlockKind.MASKS,
    BlockKind.LOGPROBS,
    BlockKind.LOGPROBS_MIDDLE,
    BlockKind.LOGPROBS_LOW,
)
"""What stands first in a block, in this order: all that a reader of tokens needs."""


class Encoding(IntEnum):
    """How a frame's numbers are written."""

    PLAIN = 0
    """Ids as u32, masks as u8, log-probabilities as float32, anything else as the level-0 record has it."""
    FLOAT16 = 1
    """Log-probabilities of the sampled tokens alone, as float16; those of the others are NaN."""
    CODES = 2
    """Ids as u16 numbers of the vocabulary's."""
    BITS = 3
    """Masks of 0 and 1, eight tokens to a byte, the first in its highest bit."""


class RawFrame(NamedTuple):
    """A frame on its way into a block. `level`: zstd's, where it is not the block's."""

    encoding: Encoding
    raw: bytes
    dictionary: PackDictionary | None = None
    level: int | None = None
    shared: bool = False


class BlockFrame(NamedTuple):
    """Where a frame lies within its block, and what its bytes hash to."""

    kind: int
    encoding: int
    shared: bool
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

    @property
    def prefix_bytes(self) -> int:
        """The header and the frames that a reader of tokens needs, which stand first."""
        return max((frame.end for frame in self.frames if frame.kind in PREFIX), default=self.header_bytes)

    def frame(self, kind: int) -> BlockFrame | None:
        """The frame of `kind`; None where the block has none."""
        for frame in self.frames:
            if frame.kind == kind:
                return frame
        return None


def join_block(rows: int, tokens: int, frames: Mapping[int, RawFrame], *, level: int) -> bytes:
    """The block of `frames` by kind, in their order, compressed at zstd `level`."""
    table, body = b"", []
    for kind, frame in frames.items():
        stored = _stored(frame, level)
        shared = frame.shared or (frame.dictionary is not None and len(stored) < len(frame.raw))
        digest = xxhash.xxh3_64_intdigest(stored)
        table += _FRAME.pack(kind, frame.encoding, shared, len(stored), len(frame.raw), digest)
        body.append(stored)
    head = _FIXED.pack(_MAGIC, MINOR, len(frames), rows, tokens, sum(map(len, body))) + table
    return b"".join([head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), *body])


def _stored(frame: RawFrame, level: int) -> bytes:
    level = level if frame.level is None else frame.level
    compressing = compress if frame.dictionary is None else frame.dictionary.compress
    stored = compressing(frame.raw, level)
    return stored if len(stored) < _WORTH * len(frame.raw) else frame.raw


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
    for kind, encoding, shared, stored, raw, frame_digest in _FRAME.iter_unpack(data[_FIXED.size : end]):
        frames.append(BlockFrame(kind, encoding, shared != 0, start, stored, raw, frame_digest))
        start += stored
    return BlockHeader(rows, tokens, tuple(frames), end + _CHECKSUM.size, end + _CHECKSUM.size + body)


def check_frame(frame: BlockFrame, stored: bytes | memoryview, where: str) -> None:
    """Raises `ShardCorruptError` unless `stored` are the bytes of `frame`."""
    if len(stored) != frame.stored_bytes or xxhash.xxh3_64_intdigest(stored) != frame.checksum:
        raise ShardCorruptError(f"{where}: frame {frame.kind} does not match its checksum")


def open_block_frame(
    frame: BlockFrame, stored: memoryview, where: str, dictionary: PackDictionary | None = None
) -> memoryview:
    """The raw bytes of `frame`, whose `stored` bytes were checked."""
    if frame.stored_bytes == frame.raw_bytes:
        return stored
    opening = decompress if dictionary is None else dictionary.decompressor.decompress
    try:
        return opening(stored, frame.raw_bytes)
    except ShardCorruptError as error:
        raise ShardCorruptError(f"{where}: frame {frame.kind}: {error}") from error
