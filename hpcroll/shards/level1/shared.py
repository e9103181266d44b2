"""What the blocks of a pack share: a vocabulary of ids, and dictionaries of their tokens and texts.

It stands in a block without rows, the first of a pack and again the last: every other block depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpcroll.contract import Ids
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.level1.block import (
    BlockHeader,
    BlockKind,
    Encoding,
    RawFrame,
    check_frame,
    join_block,
    open_block_frame,
)
from hpcroll.shards.level1.dictionary import PackDictionary
from hpcroll.shards.level1.token_columns import halves, join_halves

_LEVEL = 19
_FRAMES = {BlockKind.TOKENS: BlockKind.SHARED_TOKENS, BlockKind.REST: BlockKind.SHARED_REST}


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """`vocabulary`: uint32 (S,), ids by how frequent they are. `dictionaries` by the kind of frames that they
    are for."""

    vocabulary: Ids = field(default_factory=lambda: np.empty(0, np.uint32))
    dictionaries: Mapping[int, PackDictionary] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return len(self.vocabulary) > 0 or bool(self.dictionaries)


def encode_shared(shared: Shared) -> bytes:
    """The block without rows that holds it."""
    frames: dict[int, RawFrame] = {}
    frames[BlockKind.SHARED_VOCABULARY] = RawFrame(Encoding.PLAIN, halves(shared.vocabulary))
    for kind, dictionary in shared.dictionaries.items():
        frames[_FRAMES[BlockKind(kind)]] = RawFrame(Encoding.PLAIN, dictionary.content)
    return join_block(0, 0, frames, level=_LEVEL)


def decode_shared(header: BlockHeader, data: memoryview, where: str) -> Shared:
    """What the block `data` without rows holds; raises `ShardCorruptError` where it is not as written."""
    raw = {}
    for frame in header.frames:
        stored = data[frame.start : frame.end]
        check_frame(frame, stored, where)
        raw[frame.kind] = bytes(open_block_frame(frame, stored, where))
    if BlockKind.SHARED_VOCABULARY not in raw:
        raise ShardCorruptError(f"{where}: the block has neither rows nor a vocabulary")
    return Shared(
        join_halves(memoryview(raw[BlockKind.SHARED_VOCABULARY])),
        {kind: PackDictionary(raw[own]) for kind, own in _FRAMES.items() if own in raw},
    )
