"""Packs: what a packer makes of level 0, read back row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpcroll.fs import publish
from hpcroll.shards import open_run
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import ALL_COLUMNS, Column, StoredTrajectory
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.level1.packer import Packer, PackOptions
from tests.shard_runs import ShardRun, ref, trajectory


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def the_chain(run: ShardRun) -> PackChain:
    chain = PackChain(run.paths)
    chain.refresh()
    return chain


def open_pack(run: ShardRun, generation: int = 0) -> OpenPack:
    chain = the_chain(run)
    return OpenPack(chain.data_file(chain[generation]), chain[generation])


def packed_ordinals(run: ShardRun) -> list[int]:
    found = []
    for manifest in the_chain(run):
        with open_pack(run, manifest.generation) as pack:
            found += [pack.ref(row).ordinal for row in range(len(pack))]
    return found


def assert_as_committed(stored: StoredTrajectory) -> None:
    expected = trajectory(stored.ref.ordinal, incarnation=stored.incarnation)
    assert stored.record == expected.record
    assert len(stored.tokens) == len(expected.tokens)
    for mine, theirs in zip(stored.tokens, expected.tokens, strict=True):
        for name in ("ids", "sampled", "loss_mask", "logprobs"):
            column = getattr(mine, name)
            np.testing.assert_array_equal(column, getattr(theirs, name))
            assert column.dtype == getattr(theirs, name).dtype
            assert not column.flags.writeable


def test_whole_groups_are_packed_and_read_as_they_were_committed(run: ShardRun) -> None:
    with run.writer("w0") as first, run.writer("w1") as second:
        run.commit(first, "w0", range(0, 24, 2))
        run.commit(second, "w1", range(1, 24, 2))
        run.commit(first, "w0", [40])  # its group is not whole
        report = Packer(run.paths).pack()
        assert [(made.generation, made.rows, made.groups) for made in report.packs] == [(0, 24, 6)]
        reader = open_run(run.paths.root)
        with open_pack(run) as pack:
            assert len(pack) == 24
            assert pack.damage() == []
            for row in range(len(pack)):
                stored = pack.read(row, ALL_COLUMNS)
                assert_as_committed(stored)
                level0 = reader.get(stored.rollout_id)
                assert (stored.place, stored.attempt) == (level0.place, level0.attempt)
                assert stored.summary == level0.summary
    assert packed_ordinals(run) == list(range(24))


def test_rows_are_found_by_place_rollout_and_group(run: ShardRun) -> None:
    with run.writer("w0") as first, run.writer("w1") as second:
        run.commit(first, "w0", range(0, 16, 2))
        run.commit(second, "w1", range(1, 16, 2))
    Packer(run.paths).pack()
    with open_pack(run) as pack:
        for row in range(len(pack)):
            stored = pack.read(row, [Column.TOKENS])
            assert pack.row_of(stored.place) == row
            assert pack.row_of_rollout(stored.ref) == row
            assert row in pack.rows_of_group(stored.group_id)
        assert [len(pack.rows_of_group(stored.group_id)) for _ in range(1)] == [stored.summary.group_size]
        assert pack.row_of(Place(ShardName("w0", 0), 1)) is None
        assert pack.row_of(Place(ShardName("nobody", 0), 0)) is None
        assert pack.row_of_rollout(ref(16)) is None
        assert len(pack.rows_of_group("nothing")) == 0


def test_entries_are_left_until_they_are_settled_and_packed_once(run: ShardRun) -> None:
    with run.writer("w0") as writer, run.writer("w1") as other:
        run.commit(writer, "w0", range(4))
        open_entry = writer.append(trajectory(4))
        lost_entry = writer.append(trajectory(5))
        run.commit(other, "w1", [5, 6, 7], mark=False)
        Packer(run.paths).pack()
        assert packed_ordinals(run) == [0, 1, 2, 3]
        name = ShardName("w0", 0)
        frontier = the_chain(run).frontier(name)
        assert frontier.pending == {open_entry.offset}, "what lost is dropped, what is open is left"
        assert frontier.holds(lost_entry.offset)
        assert the_chain(run).frontier(ShardName("w1", 0)).pending != set()
        writer.sync()
        run.confirm(4, "w0")
        Packer(run.paths).pack()
        assert packed_ordinals(run) == list(range(8))
        assert the_chain(run).frontier(name).pending == set()
        assert Packer(run.paths).pack().packs == []


def test_a_closed_run_is_packed_whole(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(6))
    Packer(run.paths).pack()
    assert packed_ordinals(run) == [0, 1, 2, 3]
    publish(run.paths.closed, b"{}")
    Packer(run.paths).pack()
    assert packed_ordinals(run) == list(range(6))


def test_arrays_stay_as_they_are_while_anybody_holds_a_part_of_them(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        for group in range(12):
            run.commit(
                writer, "w0", range(4 * group, 4 * group + 4), turns=1, extra={"bulk": "x" * 2_000_000}
            )
    Packer(run.paths).pack()
    with open_pack(run) as pack:
        assert len(list(pack.blocks())) == 12
        held = {}
        for row in range(len(pack)):
            tokens = pack.read(row, ALL_COLUMNS).tokens
            held[row] = tokens[0].ids[1:3]  # a view of a view is all that is kept
        for row, ids in held.items():
            np.testing.assert_array_equal(ids, pack.read(row, [Column.TOKENS]).tokens[0].ids[1:3])


def test_half_width_logprobs_come_back_as_float32_within_their_error(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(4))
    Packer(run.paths, PackOptions(float16=True)).pack()
    with open_pack(run) as pack:
        for row in range(len(pack)):
            stored = pack.read(row, [Column.TOKENS])
            for mine, theirs in zip(stored.tokens, trajectory(stored.ref.ordinal).tokens, strict=True):
                assert mine.logprobs.dtype == np.float32
                np.testing.assert_array_equal(np.isnan(mine.logprobs), np.isnan(theirs.logprobs))
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=2**-11, atol=2**-24)
                np.testing.assert_array_equal(mine.ids, theirs.ids)
