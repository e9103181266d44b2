"""Chooses what the blocks of a pack share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcroll.shards.format.frames import FrameKind
from hpcroll.shards.level1.block import BlockKind
from hpcroll.shards.level1.block_writer import PackedRow
from hpcroll.shards.level1.dictionary import PackDictionary
from hpcroll.shards.level1.shared import Shared
from hpcroll.shards.level1.token_columns import codes_of

SAMPLES = 32
"""Groups whose first rollout is looked at."""
_FEWEST = 8
"""Groups of a pack that share anything: fewer would not make up for it."""
_MOST_WORDS = 1 << 15
_REST_BYTES, _TOKEN_BYTES = 128 << 10, 64 << 10
"""Most bytes of the dictionaries."""
_SHARE = 256
"""A dictionary takes at most one part in this many of what is packed."""
_PARTS = 8
"""Rollouts that a dictionary has room for, and more where they have much in common."""
_OPENING = 3
"""So many parts are taken of a rollout that begins like none before."""


def make_shared(samples: Sequence[PackedRow], raw_bytes: int) -> Shared:
    """What blocks with `raw_bytes` bytes in all may share, given rollouts of several groups."""
    if len(samples) < _FEWEST:
        return Shared()
    ids = [np.concatenate([np.empty(0, np.uint32), *(part.ids for part in row.tokens)]) for row in samples]
    known, counts = np.unique(np.concatenate(ids), return_counts=True)
    vocabulary = known[np.argsort(-counts, kind="stable")[:_MOST_WORDS]].astype(np.uint32)
    codes = [codes_of(own, vocabulary)[0] for own in ids]
    found = {
        BlockKind.TOKENS: _openings(
            [own.astype("<u2").tobytes() for own in codes if own is not None],
            min(_TOKEN_BYTES, raw_bytes // (2 * _SHARE)),
        ),
        BlockKind.REST: _openings(
            [row.frames[FrameKind.TEXT] for row in samples if FrameKind.TEXT in row.frames],
            min(_REST_BYTES, raw_bytes // _SHARE),
        ),
    }
    return Shared(vocabulary, {kind: PackDictionary(data) for kind, data in found.items() if data})


def _openings(samples: Sequence[bytes], most_bytes: int) -> bytes:
    """The beginnings of `samples`, each without what it has in common with the beginning of one before."""
    part = most_bytes // _PARTS
    parts: list[bytes] = []
    for number, sample in enumerate(samples):
        common = max((_common_prefix(sample, other) for other in samples[:number]), default=0) & ~1
        length = part if common > part // _PARTS else _OPENING * part
        parts.append(sample[common : common + min(length, most_bytes - sum(map(len, parts)))])
    return b"".join(parts)


def _common_prefix(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size))
    return int(differs[0]) if len(differs) else size
