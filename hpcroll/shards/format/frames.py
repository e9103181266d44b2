"""The framing of one record: a header that can be checked alone, then compressed frames, each checksummed.

Layout, little-endian (docs/reference/shard-format.md):

    8s  magic      b"hpcroll" and the major version of the format
    H   minor      a newer minor version adds frame kinds, which older readers skip
    H   frames     how many frames follow
    I   attempt
    8s  segment    the manifest segment, 16 hexadecimal digits as 8 bytes
    I   ordinal    of the rollout in its segment
    I   reserved   0
    Q   body       bytes of all frames together
    then per frame:  I kind, I reserved, Q stored bytes, Q raw bytes, Q xxh3-64 of the stored bytes
    Q   xxh3-64 of everything before

A file of such records needs no header, footer or index of its own: after a kill, what was written is there.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import xxhash
import zstandard

from hpcroll.contract import RolloutRef
from hpcroll.errors import SchemaVersionError, ShardCorruptError

MAGIC_PREFIX = b"hpcroll"
MAJOR = 1
MINOR = 0
MAGIC = MAGIC_PREFIX + bytes([MAJOR])
_FIXED = struct.Struct("<8sHHI8sIIQ")
_FRAME = struct.Struct("<IIQQQ")
_CHECKSUM = struct.Struct("<Q")
_MOST_FRAMES = 64
HEADER_BYTES_MOST = _FIXED.size + _MOST_FRAMES * _FRAME.size + _CHECKSUM.size
"""No header is longer, so one read of this many bytes holds any."""


class FrameKind(IntEnum):
    """What a frame holds; frames stand in this order, so that a prefix of the record serves a trainer."""

    SUMMARY = 1
    """JSON: what filters, groups and packing ask for."""
    TOKENS = 2
    """ids u32, log-probabilities f32, sampled u8, loss mask u8; each for all segments in a row."""
    RECORD = 3
    """JSON: the record without messages and replies."""
    TEXT = 4
    """JSON: messages and reply of each call."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a frame lies within its record, and what its bytes hash to."""

    kind: int
    start: int
    stored_bytes: int
    raw_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Header:
    """A record's header; `checksum` (xxh3-64 over the header) covers the frames' checksums too."""

    ref: RolloutRef
    attempt: int
    frames: tuple[Frame, ...]
    header_bytes: int
    record_bytes: int
    checksum: int

    def frame(self, kind: FrameKind) -> Frame:
        """The frame of `kind`; raises `ShardCorruptError` where the record has none."""
        for frame in self.frames:
            if frame.kind == kind:
                return frame
        raise ShardCorruptError(f"rollout {self.ref}: its record has no {kind.name} frame")

    def prefix_bytes(self, kinds: Iterable[FrameKind]) -> int:
        """How many bytes from the record's start hold the header and the frames of `kinds`."""
        wanted = frozenset(kinds)
        ends = [f.start + f.stored_bytes for f in self.frames if f.kind in wanted]
        return max(ends, default=self.header_bytes)


def join_frames(ref: RolloutRef, attempt: int, frames: Mapping[FrameKind, bytes], *, level: int) -> bytes:
    """The record of `frames` (raw), compressed at zstd `level`."""
    stored = {kind: _compressor(level).compress(raw) for kind, raw in sorted(frames.items())}
    table = b"".join(
        _FRAME.pack(kind, 0, len(data), len(frames[kind]), xxhash.xxh3_64_intdigest(data))
        for kind, data in stored.items()
    )
    body = b"".join(stored.values())
    segment = bytes.fromhex(ref.segment)
    head = _FIXED.pack(MAGIC, MINOR, len(stored), attempt, segment, ref.ordinal, 0, len(body)) + table
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)) + body


def parse_header(data: bytes | memoryview) -> Header | None:
    """The header that `data` begins with; None where it is short, torn, zeroed or damaged.

    Raises `SchemaVersionError` for a sound header of another major version.
    """
    if len(data) < _FIXED.size:
        return None
    magic, _, count, attempt, segment, ordinal, _, body = _FIXED.unpack_from(data)
    end = _FIXED.size + count * _FRAME.size
    if magic[:7] != MAGIC_PREFIX or count > _MOST_FRAMES or len(data) < end + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, end)
    if xxhash.xxh3_64_intdigest(data[:end]) != checksum:
        return None
    if magic != MAGIC:
        raise SchemaVersionError(
            f"a record has shard format {magic[7]}, this hpcroll reads {MAJOR}; use the hpcroll that wrote it"
        )
    frames, start = [], end + _CHECKSUM.size
    for index in range(count):
        kind, _, stored, raw, digest = _FRAME.unpack_from(data, _FIXED.size + index * _FRAME.size)
        frames.append(Frame(kind, start, stored, raw, digest))
        start += stored
    ref = RolloutRef(segment.hex(), ordinal)
    header_bytes = end + _CHECKSUM.size
    return Header(ref, attempt, tuple(frames), header_bytes, header_bytes + body, checksum)


def open_frame(header: Header, kind: FrameKind, record: bytes | memoryview) -> bytes:
    """The raw bytes of a frame, from `record` (a record's bytes, at least up to that frame's end).

    Raises `ShardCorruptError` where the bytes do not match their checksum.
    """
    frame = header.frame(kind)
    stored = memoryview(record)[frame.start : frame.start + frame.stored_bytes]
    if len(stored) != frame.stored_bytes or xxhash.xxh3_64_intdigest(stored) != frame.checksum:
        raise ShardCorruptError(
            f"rollout {header.ref} attempt {header.attempt}: frame {kind.name} does not match its checksum"
        )
    return _decompressor().decompress(stored, max_output_size=frame.raw_bytes)


def is_sound(header: Header, record: bytes | memoryview, kinds: Collection[FrameKind] | None = None) -> bool:
    """Whether the frames of `kinds` (None: all) in `record` match their checksums.

    `record` holds a record's bytes at least up to the last of those frames, else the answer is no.
    """
    view = memoryview(record)
    return all(
        xxhash.xxh3_64_intdigest(view[f.start : f.start + f.stored_bytes]) == f.checksum
        and len(view) >= f.start + f.stored_bytes
        for f in header.frames
        if kinds is None or f.kind in kinds
    )


_threads = threading.local()  # one (de)compressor per thread: a shared one crashes under concurrent use


def _compressor(level: int) -> zstandard.ZstdCompressor:
    by_level: dict[int, zstandard.ZstdCompressor] = _threads.__dict__.setdefault("compressors", {})
    if level not in by_level:
        by_level[level] = zstandard.ZstdCompressor(level=level)
    return by_level[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_threads, "decompressor", None)
    if found is None:
        found = _threads.decompressor = zstandard.ZstdDecompressor()
    return found
