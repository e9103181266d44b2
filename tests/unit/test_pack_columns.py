"""Columns of a block: every bit of an id, a mask and a log-probability comes back, shared or alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hpcroll.contract import SegmentTokens
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.codec import encode_trajectory
from hpcroll.shards.format.frames import FrameKind, parse_header
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import ALL_COLUMNS, Column
from hpcroll.shards.level1.block import BlockKind, Encoding, parse_block_header
from hpcroll.shards.level1.block_writer import PackedRow, encode_block
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.level1.pack_writer import PackFileWriter
from hpcroll.shards.level1.shared import Shared
from hpcroll.shards.level1.sharing import make_shared
from hpcroll.shards.level1.token_columns import codes_of
from tests.shard_runs import trajectory


def row(ordinal: int, tokens: SegmentTokens | None = None) -> PackedRow:
    """A rollout on its way into a pack, with its own tokens or these, of one segment."""
    data = encode_trajectory(trajectory(ordinal, incarnation="v", turns=12))
    header = parse_header(data)
    assert header is not None
    made = PackedRow.of(Place(ShardName("v", 0), ordinal), header, data)
    if tokens is None:
        return made
    summary = made.summary._replace(
        lengths=(len(tokens.ids),),
        weights=(1.0,),
        version_low=(0,),
        version_high=(0,),
        trained=(),
        sampled=(),
    )
    return PackedRow(made.place, made.header, summary, (tokens,), made.frames)


def written(path: Path, blocks: Sequence[Sequence[PackedRow]], shared: Shared | None = None) -> OpenPack:
    with PackFileWriter(path, level=3, shared=shared) as writer:
        for rows in blocks:
            writer.add(rows)
        writer.finish()
    return OpenPack(path)


def same(found: SegmentTokens, expected: SegmentTokens) -> bool:
    """Whether all arrays are the same, bit by bit."""
    return all(
        getattr(found, name).tobytes() == getattr(expected, name).tobytes()
        for name in ("ids", "sampled", "loss_mask", "logprobs")
    )


def segment(
    ids: Sequence[int],
    logprobs: Sequence[float],
    sampled: Sequence[int],
    loss_mask: Sequence[int] | None = None,
) -> SegmentTokens:
    flags = np.array(sampled, np.uint8)
    own = flags.copy() if loss_mask is None else np.array(loss_mask, np.uint8)
    return SegmentTokens(np.array(ids, np.uint32), flags, own, np.array(logprobs, np.float32))


NAN = float("nan")


@pytest.mark.parametrize(
    "tokens",
    [
        segment([], [], []),
        segment([5, 4_000_000_000, 5, 0], [NAN, NAN, NAN, NAN], [0, 0, 0, 0]),
        segment([1, 2, 3, 4, 5], [-0.0, 0.0, -1e-40, -float("inf"), 3.5], [1, 1, 1, 1, 1]),
        segment([70_000, 1, 2, 3], [NAN, -0.25, NAN, -1.5], [0, 1, 0, 1]),
        segment([70_000, 1, 2, 3], [-9.0, -0.25, NAN, -1.5], [0, 1, 0, 1]),
        segment(range(9), [-1.0] * 9, [1] * 9, [1, 0, 0, 0, 0, 0, 0, 0, 1]),
        segment([1, 2, 3], [-1.0, NAN, NAN], [1, 0, 0], [255, 0, 2]),
        segment(range(0, 1_400_000, 20), [NAN] * 69_999 + [-1.0], [0] * 69_999 + [1]),
    ],
    ids=[
        "empty",
        "nothing_sampled",
        "odd_floats",
        "some",
        "also_of_others",
        "masked",
        "no_bits",
        "too_many_for_codes",
    ],
)
def test_every_bit_of_the_arrays_comes_back(tmp_path: Path, tokens: SegmentTokens) -> None:
    with written(tmp_path / "pack", [[row(0, tokens)]]) as pack:
        (found,) = pack.read(0, [Column.TOKENS]).tokens
    assert same(found, tokens)


def test_ids_become_codes_unless_there_are_too_many() -> None:
    few = segment([9, 7, 9], [NAN] * 3, [0] * 3)
    many = segment(range(70_000), [NAN] * 70_000, [0] * 70_000)
    encodings = []
    for tokens in (few, many):
        header = parse_block_header(encode_block([row(0, tokens)], level=3)[0])
        assert header is not None
        frame = header.frame(BlockKind.TOKENS)
        assert frame is not None
        encodings.append(frame.encoding)
    assert encodings == [Encoding.CODES, Encoding.PLAIN]


def test_codes_count_on_from_the_vocabulary() -> None:
    codes, alone = codes_of(np.array([4, 9, 4, 6, 5], np.uint32), np.array([9, 4], np.uint32))
    assert codes is not None
    assert (codes.tolist(), alone.tolist()) == ([1, 0, 1, 3, 2], [5, 6])


@pytest.fixture
def groups() -> list[list[PackedRow]]:
    """Eight groups of two, whose texts begin alike."""
    return [[row(2 * group), row(2 * group + 1)] for group in range(8)]


def test_blocks_that_share_are_smaller_and_read_the_same(
    tmp_path: Path, groups: list[list[PackedRow]]
) -> None:
    shared = make_shared([rows[0] for rows in groups], raw_bytes=32 << 20)
    assert set(shared.dictionaries) == {BlockKind.TOKENS, BlockKind.REST}
    with (
        written(tmp_path / "alone", groups) as alone,
        written(tmp_path / "shared", groups, shared) as sharing,
    ):
        assert [list(rows) for rows in alone.blocks()] == [list(rows) for rows in sharing.blocks()]
        for number in range(len(alone)):
            one, other = alone.read(number, ALL_COLUMNS), sharing.read(number, ALL_COLUMNS)
            assert one.record == other.record
            assert all(map(same, one.tokens, other.tokens))
        spent = [
            sum(int(size) for size, rows in zip(each._index.block_bytes, counts, strict=True) if rows)
            for each in (alone, sharing)
            for counts in [np.diff(each._index.first_row)]
        ]
    assert spent[1] < 0.9 * spent[0]


def test_few_groups_share_nothing(groups: list[list[PackedRow]]) -> None:
    assert not make_shared([rows[0] for rows in groups[:7]], raw_bytes=32 << 20)


def test_a_dictionary_has_what_many_begin_with_only_once(groups: list[list[PackedRow]]) -> None:
    shared = make_shared([rows[0] for rows in groups], raw_bytes=32 << 20)
    content = shared.dictionaries[BlockKind.REST].content
    beginning = groups[0][0].frames[FrameKind.TEXT][:64]
    assert content.count(beginning) == 1


def test_shared_block_damaged_in_both_copies_is_an_error_that_says_so(
    tmp_path: Path, groups: list[list[PackedRow]]
) -> None:
    path = tmp_path / "pack"
    with written(path, groups, make_shared([rows[0] for rows in groups], raw_bytes=32 << 20)) as pack:
        sizes = np.diff(pack._index.first_row)
        offsets = [int(pack._index.block_offset[n]) for n in np.flatnonzero(sizes == 0)]
        ends = [
            int(pack._index.block_bytes[n]) + at
            for n, at in zip(np.flatnonzero(sizes == 0), offsets, strict=True)
        ]
    assert len(offsets) == 2
    data = bytearray(path.read_bytes())
    data[ends[0] - 1] ^= 1
    path.write_bytes(data)
    with OpenPack(path) as pack:
        assert len(pack.damage()) == 1
        assert pack.read(0, ALL_COLUMNS).record.rollout_id.endswith("/0")
    data[ends[1] - 1] ^= 1
    path.write_bytes(data)
    with OpenPack(path) as pack:
        assert len(pack.damage()) == 2
        with pytest.raises(ShardCorruptError, match="share is damaged in every copy"):
            pack.read(0, ALL_COLUMNS)
        assert pack.read(0, []).summary.group_size


def test_a_row_that_is_picked_alone_is_the_same_as_among_all(
    tmp_path: Path, groups: list[list[PackedRow]]
) -> None:
    block = [each for rows in groups for each in rows]
    with written(tmp_path / "pack", [block]) as pack:
        all_of_them = [pack.read(number, [Column.TOKENS]).tokens for number in range(len(block))]
    with OpenPack(tmp_path / "pack") as pack:
        for number in (9, 3, 15, 0, 7):
            found = pack.read(number, [Column.TOKENS]).tokens
            assert len(found) == len(all_of_them[number])
            assert all(map(same, found, all_of_them[number]))
            assert not any(part.logprobs.flags.writeable or part.ids.flags.writeable for part in found)
