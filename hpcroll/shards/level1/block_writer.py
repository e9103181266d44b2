"""Rows of level 0 as the bytes of one block."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import SegmentTokens
from hpcroll.shards.format.codec import Summary, read_summary, read_tokens
from hpcroll.shards.format.frames import FrameKind, Header, open_frame
from hpcroll.shards.format.place import Place
from hpcroll.shards.level1.block import BlockKind, Encoding, join_block
from hpcroll.shards.level1.rows import RowCollector
from hpcroll.shards.level1.table import encode_table

ABSENT = (1 << 64) - 1
"""Stands for the length of what a row does not have."""
REST_COUNT = struct.Struct("<I")
REST_ENTRY = struct.Struct("<IQ")
_LOWEST_FLOAT16 = np.float32(np.finfo(np.float16).min)
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
                frame.kind: open_frame(header, frame.kind, data)
                for frame in header.frames
                if frame.kind not in _IN_COLUMNS
            },
        )

    @property
    def token_count(self) -> int:
        return sum(self.summary.lengths)


def encode_block(rows: Sequence[PackedRow], *, level: int, float16: bool = False) -> tuple[bytes, bytes]:
    """The block of `rows`, and the table of them that the pack's index takes up.

    `level` is zstd's. `float16` writes log-probabilities in half the bytes, with a relative error of up to
    2**-11; values below -65504 become that. Blocks where tokens that were not sampled have one stay plain.
    """
    collector = RowCollector()
    for row in rows:
        collector.add(row.place, row.header, row.summary)
    table = encode_table(collector.columns())
    segments = [segment for row in rows for segment in row.tokens]
    frames: dict[int, tuple[Encoding, bytes]] = {
        BlockKind.SUMMARIES: (Encoding.PLAIN, table),
        BlockKind.TOKENS: (Encoding.PLAIN, _token_bytes(segments)),
        BlockKind.LOGPROBS: _logprobs(segments, float16=float16),
    }
    carried = {
        kind: _ragged_bytes([row.frames.get(kind) for row in rows])
        for kind in sorted({kind for row in rows for kind in row.frames})
    }
    rest: dict[int, bytes] = {kind: carried.pop(kind) for kind in _IN_REST if kind in carried}
    frames[BlockKind.REST] = (Encoding.PLAIN, _rest_bytes(rest))
    frames |= {kind: (Encoding.PLAIN, raw) for kind, raw in carried.items()}
    tokens = sum(row.token_count for row in rows)
    return join_block(len(rows), tokens, frames, level=level), table


def _logprobs(segments: Sequence[SegmentTokens], *, float16: bool) -> tuple[Encoding, bytes]:
    if float16 and all(np.isnan(segment.logprobs[segment.sampled == 0]).all() for segment in segments):
        sampled = [segment.logprobs[segment.sampled != 0] for segment in segments]
        return Encoding.FLOAT16, _bytes([np.maximum(part, _LOWEST_FLOAT16) for part in sampled], "<f2")
    return Encoding.PLAIN, _bytes([segment.logprobs for segment in segments], "<f4")


def _token_bytes(segments: Sequence[SegmentTokens]) -> bytes:
    ids = _bytes([segment.ids for segment in segments], "<u4")
    sampled = _bytes([segment.sampled for segment in segments], "u1")
    loss_mask = _bytes([segment.loss_mask for segment in segments], "u1")
    return ids + sampled + (b"" if loss_mask == sampled else loss_mask)


def _rest_bytes(kinds: Mapping[int, bytes]) -> bytes:
    directory = b"".join(REST_ENTRY.pack(kind, len(raw)) for kind, raw in kinds.items())
    return b"".join([REST_COUNT.pack(len(kinds)), directory, *kinds.values()])


def _ragged_bytes(values: Sequence[bytes | None]) -> bytes:
    """Q length of each value (2^64 - 1: absent), then the values."""
    lengths = np.array([ABSENT if value is None else len(value) for value in values], "<u8")
    return lengths.tobytes() + b"".join(value for value in values if value is not None)


def _bytes(parts: Sequence[NDArray[Any]], dtype: str) -> bytes:
    return b"".join(np.ascontiguousarray(part, dtype).tobytes() for part in parts)
