"""Marks: fixed-size entries that say where a committed record lies; an index that anyone can rebuild."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from hpcroll.contract import RolloutRef

_MAGIC = b"hpcrmark"
_ENTRY = struct.Struct("<8sQQQ8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_REF_AT = 32
"""Where segment and ordinal stand in an entry."""
ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class RecordAddress:
    """Where a record lies: `length` bytes at `offset` of its incarnation's shard `shard_index`.

    `checksum` is that of the record's header, which covers the rest.
    """

    shard_index: int
    offset: int
    length: int
    ref: RolloutRef
    attempt: int
    checksum: int


def pack_mark(address: RecordAddress) -> bytes:
    """The 64 bytes of a mark: 8s magic, Q shard, Q offset, Q length, 8s segment, I ordinal, I attempt,
    Q checksum of the record's header, Q xxh3-64 of the bytes before."""
    entry = _ENTRY.pack(
        _MAGIC,
        address.shard_index,
        address.offset,
        address.length,
        bytes.fromhex(address.ref.segment),
        address.ref.ordinal,
        address.attempt,
        address.checksum,
    )
    return entry + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(entry))


def _positions_of(ref: RolloutRef, data: bytes) -> Iterator[int]:
    """Where entries stand that name `ref`; searched as bytes, since a log holds thousands."""
    wanted = bytes.fromhex(ref.segment) + struct.pack("<I", ref.ordinal)
    hit = data.find(wanted)
    while hit >= 0:
        position = hit - _REF_AT
        if position % ENTRY_BYTES == 0 and 0 <= position <= len(data) - ENTRY_BYTES:
            yield position
        hit = data.find(wanted, hit + 1)


def parse_marks(data: bytes, *, only: RolloutRef | None = None) -> tuple[list[RecordAddress], int]:
    """The sound marks in `data`, and how many whole entries are damaged; a short last entry is neither.

    With `only`, marks of other rollouts are not looked at.
    """
    marks, damaged = [], 0
    positions = range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES)
    for position in positions if only is None else _positions_of(only, data):
        entry = data[position : position + _ENTRY.size]
        (checksum,) = _CHECKSUM.unpack_from(data, position + _ENTRY.size)
        if xxhash.xxh3_64_intdigest(entry) != checksum or not entry.startswith(_MAGIC):
            damaged += 1
            continue
        _, shard, offset, length, segment, ordinal, attempt, record_checksum = _ENTRY.unpack(entry)
        ref = RolloutRef(segment.hex(), ordinal)
        marks.append(RecordAddress(shard, offset, length, ref, attempt, record_checksum))
    return marks, damaged
