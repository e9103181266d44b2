"""Makes the level-1 vectors: `python -m tests.vectors.make_level1` rewrites the files.

The bytes depend on the version of zstd, so that they are not made anew in tests; decoding does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hpcroll.shards.format.codec import encode_trajectory
from hpcroll.shards.format.frames import parse_header
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.level1.block import BlockKind, parse_block_header
from hpcroll.shards.level1.block_writer import PackedRow
from hpcroll.shards.level1.pack_writer import PackFileWriter
from hpcroll.shards.level1.shared import Shared
from hpcroll.shards.level1.sharing import make_shared
from tests.shard_runs import trajectory
from tests.vectors.level1_reader import read_pack

LEVEL1 = Path(__file__).parent / "level1"


def rows(ordinals: range) -> list[PackedRow]:
    """Small rollouts of a group; the last never ran, and so has no token."""
    made, offset = [], 100 * ordinals.start
    for ordinal in ordinals:
        last = ordinal == ordinals[-1]
        fields = {"reward": None, "verdict": None, "reward_valid": False} if last else {}
        data = encode_trajectory(trajectory(ordinal, incarnation="v", turns=1 + ordinal % 3, **fields))
        header = parse_header(data)
        assert header is not None
        made.append(PackedRow.of(Place(ShardName("v", ordinals.start), offset), header, data))
        offset += len(data)
    return made


def pack(*, float16: bool = False, shared: Shared | None = None) -> bytes:
    """Two blocks of a group each."""
    path = LEVEL1 / "made"
    path.unlink(missing_ok=True)
    with PackFileWriter(path, level=6, float16=float16, shared=shared) as writer:
        writer.add(rows(range(4)))
        writer.add(rows(range(4, 8)))
        writer.finish()
    data = path.read_bytes()
    path.unlink()
    return data


def sharing() -> bytes:
    """What both blocks share stands before and after them."""
    return pack(shared=make_shared(rows(range(9))[:8], raw_bytes=1 << 20))


def one_copy() -> bytes:
    """A flipped bit in the first copy of what the blocks share."""
    data = bytearray(sharing())
    header = parse_block_header(bytes(data[:4096]))
    assert header is not None
    assert header.rows == 0
    data[header.header_bytes + 5] ^= 0x10
    return bytes(data)


def damaged() -> bytes:
    """A flipped bit in the tokens of the first block and one in the rest of the second."""
    data, at = bytearray(pack()), 0
    for kind in (BlockKind.TOKENS, BlockKind.REST):
        header = parse_block_header(bytes(data[at : at + 4096]))
        assert header is not None
        frame = header.frame(kind)
        assert frame is not None
        data[at + frame.start + 5] ^= 0x10
        at += header.block_bytes
    return bytes(data)


def no_index() -> bytes:
    """Cut within the index: the rows come from the blocks."""
    return pack()[:-100]


def one_block() -> bytes:
    """A flipped bit in the first block's header, and no trailer: the second block is what is left."""
    data = bytearray(pack()[:-40])
    data[20] ^= 0x01
    return bytes(data)


PACKS: dict[str, Callable[[], bytes]] = {
    "plain": pack,
    "shared": sharing,
    "one_copy": one_copy,
    "float16": lambda: pack(float16=True),
    "damaged": damaged,
    "no_index": no_index,
    "one_block": one_block,
}


def main() -> None:
    """Writes every pack and what a reader must find in it."""
    LEVEL1.mkdir(exist_ok=True)
    for name, make in PACKS.items():
        data = make()
        (LEVEL1 / f"{name}.pack").write_bytes(data)
        (LEVEL1 / f"{name}.json").write_text(json.dumps(read_pack(data), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
