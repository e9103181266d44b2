"""Packs when things go wrong: killed packers, races, flipped bits, cut files, damaged shards."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.fs import RunPaths, publish
from hpcroll.shards.format.stored import ALL_COLUMNS
from hpcroll.shards.level1.chain import Manifest, PackChain
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.level1.packer import Packer, PackOptions, PackReport
from tests.shard_runs import ShardRun, bulk
from tests.spools import watch_operations

TRIALS = 60


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def committed(run: ShardRun, count: int = 24, **fields: object) -> None:
    with run.writer("w0") as first, run.writer("w1") as second:
        run.commit(first, "w0", range(0, count, 2), **fields)
        run.commit(second, "w1", range(1, count, 2), **fields)


def chain_of(paths: RunPaths) -> PackChain:
    chain = PackChain(paths)
    chain.refresh()
    return chain


def ordinals(paths: RunPaths) -> list[int]:
    """Every packed rollout, in no order, each as often as it is packed."""
    chain, found = chain_of(paths), []
    for manifest in chain:
        with OpenPack(chain.data_file(manifest), manifest) as pack:
            assert pack.damage() == []
            found += [pack.ref(row).ordinal for row in range(len(pack))]
    return sorted(found)


def pack_bulk(run: ShardRun) -> tuple[Path, Manifest]:
    """A pack of several blocks, its file and its manifest."""
    with run.writer("w0") as writer:
        for ordinal in range(56):
            run.commit(writer, "w0", [ordinal], **bulk(ordinal))
    Packer(run.paths).pack()
    chain = chain_of(run.paths)
    return chain.data_file(chain[0]), chain[0]


def lost_blocks(path: Path, manifest: Manifest, blocks: int) -> tuple[int, bool]:
    """How many of `blocks` blocks cannot be read in full, and whether anything was noticed."""
    with OpenPack(path, manifest) as pack:
        noticed = pack.index_damaged or pack.damage() != []
        lost = set()
        for row in range(len(pack)):
            try:
                stored = pack.read(row, ALL_COLUMNS)
                assert stored.record.rollout_id == stored.rollout_id
                assert len(stored.tokens) == len(stored.summary.lengths)
            except ShardCorruptError:
                lost.add(pack.block_of(row))
        return len(lost) + blocks - len(list(pack.blocks())), noticed


def test_each_flipped_bit_is_noticed_and_costs_at_most_one_block(run: ShardRun) -> None:
    path, manifest = pack_bulk(run)
    whole, rng = path.read_bytes(), random.Random(1)
    with OpenPack(path, manifest) as pack:
        blocks = len(list(pack.blocks()))
    assert blocks > 2
    # Besides random places: the last block's header, the index and the trailer, which are small.
    ends = [len(whole) - 1 - rng.randrange(manifest.index_bytes + 40) for _ in range(TRIALS // 4)]
    for position in ends + [rng.randrange(len(whole)) for _ in range(TRIALS)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        lost, noticed = lost_blocks(path, manifest, blocks)
        assert noticed, f"byte {position} of {len(whole)}"
        assert lost <= 1, f"byte {position} of {len(whole)}"


def test_a_pack_that_was_cut_short_is_read_up_to_there(run: ShardRun) -> None:
    path, manifest = pack_bulk(run)
    whole, rng = path.read_bytes(), random.Random(2)
    with OpenPack(path, manifest) as pack:
        numbers = [pack.block_of(rows.start) for rows in pack.blocks()]
        ends = [int(pack._index.block_offset[n] + pack._index.block_bytes[n]) for n in numbers]
    for cut in [rng.randrange(len(whole)) for _ in range(20)] + ends:
        path.write_bytes(whole[:cut])
        lost, noticed = lost_blocks(path, manifest, len(ends))
        assert noticed
        assert len(ends) - lost == sum(end <= cut for end in ends)


def test_a_manifest_outlives_any_flipped_bit_and_no_two(run: ShardRun) -> None:
    committed(run, 8)
    Packer(run.paths).pack()
    path, rng, expected = run.paths.pack_manifest(0), random.Random(3), list(chain_of(run.paths))
    whole = path.read_bytes()
    half = len(whole) // 2
    for _ in range(TRIALS):
        damaged = bytearray(whole)
        damaged[rng.randrange(half)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert list(chain_of(run.paths)) == expected
        damaged[half + rng.randrange(half)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ShardError):  # damaged, or of another version
            chain_of(run.paths)


def instants(run: ShardRun) -> Iterator[int]:
    """A child packs and dies at its n-th operation on a name or its n-th write, for each n; the n."""
    instant = 0
    while True:
        child = os.fork()
        if child == 0:
            _pack_and_die(run.paths, instant)
        _, status = os.waitpid(child, 0)
        yield instant
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        instant += 1


def _pack_and_die(paths: RunPaths, instant: int) -> None:
    """Never returns: ends with 0 where it was not killed."""
    left = [instant]

    def step(*_: object) -> None:
        if not left[0]:
            os.kill(os.getpid(), 9)
        left[0] -= 1

    write = os.write

    def half_write(descriptor: int, data: bytes) -> int:
        if not left[0]:
            write(descriptor, bytes(data)[: len(data) // 2])
        step()
        return write(descriptor, data)

    try:
        os.write = half_write  # type: ignore[assignment]
        with watch_operations(step):
            Packer(paths, PackOptions(target_mb=0.02)).pack()
    finally:
        os._exit(0)


def test_a_packer_killed_at_any_instant_leaves_nothing_half_made(run: ShardRun) -> None:
    committed(run)
    seen = []
    for _ in instants(run):
        packed = ordinals(run.paths)
        assert len(set(packed)) == len(packed)
        seen.append(len(packed))
    assert ordinals(run.paths) == list(range(24))
    assert len(seen) > 20, "it was killed at many instants"
    chain = chain_of(run.paths)
    named = {manifest.file for manifest in chain} | {str(number) for number in range(len(chain))}
    left = {path.name for path in run.paths.packs.iterdir()} - named
    # Where the last packer was killed, its file may still wait for a pack of that number.
    assert all(name.startswith((".", f"{len(chain)}-")) for name in left)


def test_two_packers_at_once_pack_everything_once(run: ShardRun) -> None:
    committed(run, 64)
    for _ in range(8):
        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                try:
                    Packer(run.paths, PackOptions(target_mb=0.02)).pack()
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        assert ordinals(run.paths) == list(range(64))
        for path in run.paths.packs.iterdir():
            path.unlink()


def test_who_lost_a_race_with_other_work_publishes_it_as_the_next(run: ShardRun) -> None:
    committed(run, 8)
    slow = Packer(run.paths)
    append, raced = slow._chain.append, []

    def late(manifest: Manifest) -> bool:
        if not raced:
            raced.append(manifest)
            with run.writer("w2") as writer:
                run.commit(writer, "w2", range(8, 12))
            # The other one packs the new group alone.
            other = Packer(run.paths)
            other._survey.groups = lambda everything: iter(  # type: ignore[method-assign]
                group
                for group in type(other._survey).groups(other._survey, everything=everything)
                if group[0].ordinal >= 8
            )
            other._pack_once(PackReport())
        return append(manifest)

    slow._chain.append = late  # type: ignore[method-assign]
    report = slow.pack()
    assert [(made.generation, made.rows) for made in report.packs] == [(1, 8)]
    assert report.thrown_away == 0
    assert ordinals(run.paths) == list(range(12))
    assert Packer(run.paths).pack().packs == []


def test_who_lost_a_race_and_its_file_begins_anew(run: ShardRun) -> None:
    committed(run, 8)
    slow = Packer(run.paths)
    append, raced = slow._chain.append, []

    def late(manifest: Manifest) -> bool:
        if not raced:
            raced.append(manifest)
            with run.writer("w2") as writer:
                run.commit(writer, "w2", range(8, 12))
            Packer(run.paths).pack()  # takes everything, and removes what it thinks a dead packer left
        return append(manifest)

    slow._chain.append = late  # type: ignore[method-assign]
    report = slow.pack()
    assert (report.packs, report.thrown_away) == ([], 1)
    assert ordinals(run.paths) == list(range(12))


def test_a_file_of_a_dead_packer_goes_once_its_number_is_taken(run: ShardRun) -> None:
    committed(run, 8)
    run.paths.packs.mkdir(exist_ok=True)
    stale, later = run.paths.pack_file(0, "dead"), run.paths.pack_file(1, "alive")
    stale.write_bytes(b"half")
    later.write_bytes(b"half")
    report = Packer(run.paths).pack()
    assert report.orphans == 1
    assert not stale.exists()
    assert later.exists(), "its maker may be alive, and about to publish it"


def test_a_damaged_committed_record_is_left_and_named(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", range(8))
        path = writer.path
    run.end("w0")
    data = bytearray(path.read_bytes())
    data[addresses[1].offset + addresses[1].length - 5] ^= 1
    path.write_bytes(data)
    report = Packer(run.paths).pack()
    assert report.damaged == [f"{path}@{addresses[1].offset}"]
    assert ordinals(run.paths) == [4, 5, 6, 7], "the rest of its group waits with it"
    publish(run.paths.closed, b"{}")
    report = Packer(run.paths).pack()
    assert report.damaged
    assert ordinals(run.paths) == [0, 2, 3, 4, 5, 6, 7], "a closed run packs what there is"
    (frontier,) = (chain_of(run.paths).frontier(name) for name in chain_of(run.paths).shards())
    assert frontier.pending == {addresses[1].offset}
