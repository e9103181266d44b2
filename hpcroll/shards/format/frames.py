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
    then per frame:  I kind, I dictionary (0: none), Q stored bytes, Q raw bytes, Q xxh3-64 of the stored
    Q   xxh3-64 of everything before

A frame whose stored and raw bytes are equally many stands as it is; any other is one zstd frame. A file of
such records needs no header, footer or index of its own: after a kill, what was written is there.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import xxhash
import zstandard

from hpcroll.contract import RolloutRef
from hpcroll.errors import SchemaVersionError, ShardCorruptError, ShardError
from hpcroll.shards.format.compression import compress, decompress
from hpcroll.shards.format.dictionaries import Dictionaries, Dictionary, find_dictionary

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
    """What filters, groups and packing ask for; see `hpcroll.shards.format.summary`. Stands as it is."""
    TOKENS = 2
    """Ids and masks of all segments in a row; see `hpcroll.shards.format.token_bytes`."""
    LOGPROBS = 3
    """Log-probabilities of all segments in a row. Stands as it is: what compresses in it is compressed."""
    RECORD = 4
    """JSON: the record without messages and replies."""
    TEXT = 5
    """JSON: messages and reply of each call."""
    COLUMNS = 6
    """JSON: the directory of optional columns; see `hpcroll.shards.format.columns`."""


_AS_IS = frozenset({FrameKind.SUMMARY, FrameKind.LOGPROBS})
_NAMES: dict[int, str] = {kind.value: kind.name for kind in FrameKind}
FIRST_EXTRA, LAST_EXTRA = 16, 63
"""The kinds of frames that hold one optional column each."""


class Frame(NamedTuple):
    """Where a frame lies within its record, and what its bytes hash to."""

    kind: int
    dictionary: int
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
    dictionaries: Dictionaries | None = field(default=None, repr=False, compare=False)
    """Where to find what the frames' dictionaries name."""

    def find(self, kind: int) -> Frame | None:
        """The frame of `kind`; None where the record has none."""
        for frame in self.frames:
            if frame.kind == kind:
                return frame
        return None

    def frame(self, kind: int) -> Frame:
        """The frame of `kind`; raises `ShardCorruptError` where the record has none."""
        frame = self.find(kind)
        if frame is None:
            raise ShardCorruptError(f"rollout {self.ref}: its record has no {_name(kind)} frame")
        return frame

    def prefix_bytes(self, kinds: Iterable[int]) -> int:
        """How many bytes from the record's start hold the header and the frames of `kinds`."""
        wanted = frozenset(kinds)
        ends = [f.start + f.stored_bytes for f in self.frames if f.kind in wanted]
        return max(ends, default=self.header_bytes)


def join_frames(
    ref: RolloutRef,
    attempt: int,
    frames: Mapping[int, bytes],
    *,
    level: int,
    dictionaries: Mapping[int, Dictionary] | None = None,
) -> bytes:
    """The record of `frames` (raw, by kind), compressed at zstd `level`.

    `dictionaries`: with what to compress the frames of a kind; a reader needs the same one.
    """
    table, body = [], []
    for kind, raw in sorted(frames.items()):
        dictionary = dictionaries.get(kind) if dictionaries is not None else None
        if kind in _AS_IS:
            stored = raw
        else:
            try:
                stored = compress(raw, _level(kind, level), dictionary)
            except zstandard.ZstdError:  # its tables do not fit into what memory is left
                stored, dictionary = compress(raw, _level(kind, level)), None
        if len(stored) >= len(raw):
            stored, dictionary = raw, None
        named = dictionary.number if dictionary is not None else 0
        table.append(_FRAME.pack(kind, named, len(stored), len(raw), xxhash.xxh3_64_intdigest(stored)))
        body.append(stored)
    head = b"".join(
        [
            _FIXED.pack(
                MAGIC,
                MINOR,
                len(body),
                attempt,
                bytes.fromhex(ref.segment),
                ref.ordinal,
                0,
                sum(map(len, body)),
            ),
            *table,
        ]
    )
    return b"".join([head, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)), *body])


def _level(kind: int, level: int) -> int:
    """At zstd's level 1 a record takes two thirds of the time of level 3 and no more bytes."""
    return 1 if kind == FrameKind.RECORD and level <= 3 else level


def parse_header(data: bytes | memoryview, dictionaries: Dictionaries | None = None) -> Header | None:
    """The header that `data` begins with; None where it is short, torn, zeroed or damaged.

    `dictionaries` are those of the run; a record that was made outside one names none. Raises
    `SchemaVersionError` for a sound header of another major version.
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
    header_bytes = start = end + _CHECKSUM.size
    frames = []
    for kind, named, stored, raw, digest in _FRAME.iter_unpack(data[_FIXED.size : end]):
        frames.append(Frame(kind, named, start, stored, raw, digest))
        start += stored
    ref = RolloutRef(segment.hex(), ordinal)
    return Header(ref, attempt, tuple(frames), header_bytes, header_bytes + body, checksum, dictionaries)


def open_frame(header: Header, kind: int, record: bytes | memoryview) -> memoryview:
    """The raw bytes of a frame, read-only, from `record` (a record's bytes, at least up to that frame's end).

    Raises `ShardCorruptError` where the bytes do not match their checksum, `ShardError` where the dictionary
    that they need is missing.
    """
    frame = header.frame(kind)
    stored = memoryview(record)[frame.start : frame.start + frame.stored_bytes]
    try:
        if len(stored) != frame.stored_bytes or xxhash.xxh3_64_intdigest(stored) != frame.checksum:
            raise ShardCorruptError("its bytes do not match their checksum")
        if frame.stored_bytes == frame.raw_bytes:
            return stored
        if not frame.dictionary:
            return decompress(stored, frame.raw_bytes)
        dictionary = find_dictionary(header.dictionaries, frame.dictionary)
        return dictionary.decompressor.decompress(stored, frame.raw_bytes)
    except ShardError as error:
        where = f"rollout {header.ref} attempt {header.attempt}: frame {_name(kind)}"
        raise type(error)(f"{where}: {error}") from error


def is_sound(header: Header, record: bytes | memoryview, kinds: Collection[int] | None = None) -> bool:
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


def _name(kind: int) -> str:
    return _NAMES.get(kind, str(kind))
