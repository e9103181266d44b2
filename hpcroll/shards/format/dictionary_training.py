"""What records have in common, as a dictionary: for each kind of frame, from the frames of a few records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import zstandard

from hpcroll.shards.format.frames import FrameKind

Parts = list[bytes | bytearray | memoryview]
TRAINED = {FrameKind.TOKENS: 256 << 10, FrameKind.RECORD: 64 << 10, FrameKind.TEXT: 256 << 10}
"""How many bytes the dictionary for a kind of frame has at most. Log-probabilities have nothing in common,
and a summary must be readable without any dictionary."""
_LEAST_BYTES = 4 << 10
_SHARE = 3
"""A dictionary takes at most one part in this many of what it is made from."""
_STRETCH = 4096
"""Longest stretch of a sample that is taken as a whole: shared prompts, files and outputs are long, and long
stretches compressed better than the short ones that zstd would try."""
_MATCH_BYTES = 8


def train(samples: Sequence[Mapping[int, bytes]]) -> dict[int, bytes]:
    """A dictionary per frame kind, made from the raw frames of `samples`; none for kinds that are too small.

    Takes some tenths of a second of one core, most of it without the interpreter's lock.
    """
    contents = {}
    for kind, most_bytes in TRAINED.items():
        parts: Parts = [frames[kind] for frames in samples if len(frames[kind]) > _MATCH_BYTES]
        size = min(most_bytes, sum(map(len, parts)) // _SHARE)
        if size >= _LEAST_BYTES:
            trained = _train_one(parts, size)
            if trained is not None:
                contents[kind.value] = trained
    return contents


def _train_one(parts: Parts, size: int) -> bytes | None:
    stretch = min(_STRETCH, size // 16)
    try:
        return zstandard.train_dictionary(size, parts, k=stretch, d=_MATCH_BYTES).as_bytes()
    except zstandard.ZstdError:  # nothing in common, or too few samples
        return None
