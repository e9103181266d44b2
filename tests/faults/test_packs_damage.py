"""A bit of a pack flips anywhere: it is noticed, and at most the rows of one block are lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain as chained
from typing import Any

import pytest
from numpy.typing import NDArray

from hpcroll.contract import SegmentTokens
from hpcroll.errors import HpcrollError
from hpcroll.shards import open_run, verify_run
from hpcroll.shards.format.stored import ALL_COLUMNS
from hpcroll.shards.level1.block import BlockKind, parse_block_header
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.level1.pack_index import TRAILER_BYTES
from hpcroll.shards.level1.packer import Packer
from tests.faults.flips import seeded_flips
from tests.shard_runs import ShardRun, trajectory

ROLLOUTS = 32


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> ShardRun:
    """A run whose one pack has several blocks; its level-0 shards are gone."""
    run = ShardRun.create(tmp_path_factory.mktemp("packs") / "run")
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(ROLLOUTS), turns=1)
    run.end("w0")
    Packer(run.paths).pack()
    for path in run.paths.shards.iterdir():
        path.unlink()
    assert verify_run(run.paths.root).problems == []
    return run


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcroll.shards.level1.packer._SHARED_BLOCK_BYTES", 1)
        yield


def the_pack(run: ShardRun) -> OpenPack:
    chain = PackChain(run.paths)
    chain.refresh()
    return OpenPack(chain.data_file(chain[0]), chain[0])


def read_rows(run: ShardRun) -> set[int]:
    """The rollouts whose every column can be read; their tokens are as they were committed."""
    found = set()
    with the_pack(run) as pack:
        for row in range(len(pack)):
            try:
                stored = pack.read(row, ALL_COLUMNS)
            except HpcrollError:
                continue
            ordinal = pack.ref(row).ordinal
            assert [tuple(column.tobytes() for column in columns(t)) for t in stored.tokens] == TOKENS[
                ordinal
            ]
            found.add(ordinal)
    return found


def columns(tokens: SegmentTokens) -> tuple[NDArray[Any], ...]:
    return tokens.ids, tokens.sampled, tokens.loss_mask, tokens.logprobs


TOKENS = [
    [tuple(column.tobytes() for column in columns(t)) for t in trajectory(n, turns=1).tokens]
    for n in range(ROLLOUTS)
]


def test_every_flipped_bit_of_a_pack_is_noticed_and_costs_at_most_one_block(packed: ShardRun) -> None:
    with the_pack(packed) as pack:
        path = pack.path
        blocks = [{pack.ref(row).ordinal for row in block} for block in pack.blocks()]
    assert len(blocks) == 8
    size = path.stat().st_size
    chance = random.Random(11)
    # The end, which says where the index lies, is small and would hardly be hit.
    for position in chained(seeded_flips(path, 260, chance), seeded_flips(path, 40, chance, least=size - 40)):
        lost = set(range(ROLLOUTS)) - read_rows(packed)
        assert lost == set() or lost in blocks, position
        with the_pack(packed) as pack:
            assert pack.damage() or len(pack) < ROLLOUTS, position


def test_verify_names_a_flipped_bit_of_a_pack_and_what_it_costs(packed: ShardRun) -> None:
    with the_pack(packed) as pack:
        path = pack.path
    for position in seeded_flips(path, 20, random.Random(12)):
        lost = set(range(ROLLOUTS)) - read_rows(packed)
        report = verify_run(packed.paths.root)
        assert report.problems, position
        assert (report.lost, report.committed) == (len(lost), ROLLOUTS - len(lost)), position


def test_every_flipped_bit_of_a_manifest_is_noticed_and_costs_nothing(packed: ShardRun) -> None:
    path = packed.paths.pack_manifest(0)
    for position in seeded_flips(path, 60, random.Random(13)):
        report = verify_run(packed.paths.root)
        assert report.problems, position
        assert (report.lost, report.committed) == (0, ROLLOUTS), position


def test_reader_goes_on_past_a_flipped_bit_of_a_pack_and_counts_it(packed: ShardRun) -> None:
    with the_pack(packed) as pack:
        path = pack.path
        blocks = [{pack.ref(row).ordinal for row in block} for block in pack.blocks()]
    needless = needless_bytes(path.read_bytes())
    for position in seeded_flips(path, 160, random.Random(14)):
        with the_pack(packed) as pack:
            index_damaged = pack.index_damaged
        reader = open_run(packed.paths.root, columns=["tokens", "text"])
        had = [item.ref.ordinal for item in reader]
        assert len(had) == len(set(had)), position
        lost = set(range(ROLLOUTS)) - set(had)
        assert lost == set() or lost in blocks, position
        assert reader.counts.committed_lost == len(lost), position
        assert reader.counts.corrupt == bool(lost) + index_damaged, position
        assert lost or index_damaged or any(position in part for part in needless), position


def needless_bytes(data: bytes) -> list[range]:
    """What a reader of everything does without: the trailer, which the manifest stands for, and the copies
    of what the index says and of what blocks share."""
    found, start, shared = [range(len(data) - TRAILER_BYTES, len(data))], 0, 0
    while (header := parse_block_header(data[start:])) is not None:
        if header.rows == 0:
            shared += 1
            # The second copy is read where the first is damaged, so neither is missed.
            found.append(range(start, start + header.block_bytes))
        for frame in header.frames:
            if frame.kind == BlockKind.SUMMARIES:
                found.append(range(start + frame.start, start + frame.end))
        start += header.block_bytes
    assert shared == 2
    return found
