"""Rows of level 0 as the bytes of one block."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcroll.contract import SegmentTokens
from hpcroll.shards.format.codec import Summary, read_summary, read_tokens
from hpcroll.shards.format.frames import FrameKind, Header, open_frame
from hpcroll.shards.format.place import Place
from hpcroll.shards.level1.block import BlockKind, Encoding, RawFrame, join_block
from hpcroll.shards.level1.rows import RowCollector
from hpcroll.shards.level1.shared import Shared
from hpcroll.shards.level1.table import encode_table
from hpcroll.shards.level1.token_columns import id_frames, logprob_frames, mask_frame

ABSENT = (1 << 64) - 1
"""Stands for the length of what a row does not have."""
REST_COUNT = struct.Struct("<I")
REST_ENTRY = struct.Struct("<IQ")
_IN_COLUMNS = frozenset({FrameKind.SUMMARY, FrameKind.TOKENS, FrameKind.LOGPROBS})
_IN_REST = (FrameKind.RECORD, FrameKind.TEXT)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A level-0 record on its way into a block. `frames`: raw bytes of what is carried as it is, by kind."""

    place: Place
    header: Header
    summary: Summary
    tokens: tuple[SegmentTokens, ...]
    frames: dict[int, bytes]

    @classmethod
    def of(cls, place: Place, header: Header, data: bytes) -> PackedRow:
        """The record of `header` in `data`; raises `ShardCorruptError` where a frame is not as written."""
        summary = read_summary(header, data)
        return cls(
            place=place,
            header=header,
            summary=summary,
            tokens=read_tokens(header, summary, data),
            frames={
                frame.kind: bytes(open_frame(header, frame.kind, data))
                for frame in header.frames
                if frame.kind not in _IN_COLUMNS
            },
        )

    @property
    def token_count(self) -> int:
        return sum(self.summary.lengths)


def encode_block(
    rows: Sequence[PackedRow], *, level: int, float16: bool = False, shared: Shared | None = None
) -> tuple[bytes, bytes]:
    """The block of `rows`, and the table of them that the pack's index takes up.

    `level` is zstd's. `float16` writes log-probabilities in half the bytes, with a relative error of up to
    2**-11; values below -65504 become that. Blocks where tokens that were not sampled have one stay plain.
    `shared`: what the pack's blocks share, which is needed to read the block again.
    """
    shared = shared or Shared()
    collector = RowCollector()
    for row in rows:
        collector.add(row.place, row.header, row.summary)
    table = encode_table(collector.columns())
    segments = [segment for row in rows for segment in row.tokens]
    carried = {
        kind: _ragged_bytes([row.frames.get(kind) for row in rows])
        for kind in sorted({kind for row in rows for kind in row.frames})
    }
    rest = _rest_bytes({kind: carried.pop(kind) for kind in _IN_REST if kind in carried})
    frames: dict[int, RawFrame] = {
        BlockKind.SUMMARIES: RawFrame(Encoding.PLAIN, table),
        **id_frames(segments, shared.vocabulary, shared.dictionaries.get(BlockKind.TOKENS)),
        BlockKind.MASKS: mask_frame(segments),
        **logprob_frames(segments, float16=float16),
        BlockKind.REST: RawFrame(Encoding.PLAIN, rest, shared.dictionaries.get(BlockKind.REST)),
        **{kind: RawFrame(Encoding.PLAIN, raw) for kind, raw in carried.items()},
    }
    tokens = sum(row.token_count for row in rows)
    return join_block(len(rows), tokens, frames, level=level), table


def _rest_bytes(kinds: Mapping[int, bytes]) -> bytes:
    directory = b"".join(REST_ENTRY.pack(kind, len(raw)) for kind, raw in kinds.items())
    return b"".join([REST_COUNT.pack(len(kinds)), directory, *kinds.values()])


def _ragged_bytes(values: Sequence[bytes | None]) -> bytes:
    """Q length of each value (2^64 - 1: absent), then the values."""
    lengths = np.array([ABSENT if value is None else len(value) for value in values], "<u8")
    return lengths.tobytes() + b"".join(value for value in values if value is not None)
