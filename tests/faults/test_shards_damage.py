"""A finished shard is cut or flipped anywhere: the damage is noticed, the other records are read once."""

from __future__ import annotations

import random

import pytest

from hpcroll.shards import RecordAddress, open_run, verify_run
from hpcroll.shards.format.stored import Column, StoredTrajectory, frames_of
from hpcroll.shards.level0.shard_file import OpenShard, ShardName
from tests.faults.flips import seeded_flips
from tests.shard_runs import ShardRun, trajectory

ROLLOUTS = 8
Finished = tuple[ShardRun, list[RecordAddress]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = ShardRun.create(tmp_path_factory.mktemp("damage") / "run")
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", range(ROLLOUTS), turns=1)
    run.end("w0")
    return run, addresses


def delivered(run: ShardRun, *, trusted: bool, columns: tuple[str, ...] | None = ()) -> tuple[list[int], int]:
    reader = open_run(run.paths.root, trust_marks=trusted, columns=columns)
    return [item.ref.ordinal for item in reader], reader.counts.corrupt


@pytest.mark.parametrize("trusted", [False, True])
def test_cut_anywhere_keeps_the_records_before_it(finished: Finished, trusted: bool) -> None:
    run, addresses = finished
    path = run.paths.shard_file("w0", 0)
    whole = path.read_bytes()
    chance = random.Random(3)
    ends = [address.offset + address.length for address in addresses]
    try:
        for length in (0, 1, *ends, *(chance.randrange(len(whole)) for _ in range(60))):
            path.write_bytes(whole[:length])
            kept = [n for n, end in enumerate(ends) if end <= length]
            at_boundary = length in (0, *ends)
            found = delivered(run, trusted=trusted, columns=None)
            assert found == (kept, 0 if at_boundary else 1), length
            assert verify_run(run.paths.root).ok == (len(kept) == ROLLOUTS), length
            path.write_bytes(whole[:length] + b"\0" * (len(whole) - length))
            assert delivered(run, trusted=trusted, columns=None)[0] == kept, length
    finally:
        path.write_bytes(whole)


def test_every_flipped_bit_of_a_shard_is_noticed_and_costs_one_record(finished: Finished) -> None:
    run, addresses = finished
    path = run.paths.shard_file("w0", 0)
    chance = random.Random(5)
    for position in seeded_flips(path, 400, chance):
        hit = max(n for n, address in enumerate(addresses) if address.offset <= position)
        reader = open_run(run.paths.root, trust_marks=chance.random() < 0.5)
        others = [n for n in range(ROLLOUTS) if n != hit]
        assert [item.ref.ordinal for item in reader] == others, position
        assert (reader.counts.corrupt, reader.counts.committed_lost) == (1, 1), position


def test_flip_in_a_column_that_nobody_asked_for_costs_nothing_and_verify_names_it(
    finished: Finished,
) -> None:
    run, addresses = finished
    path = run.paths.shard_file("w0", 0)
    chance = random.Random(8)
    columns = frozenset({Column.TOKENS})
    with OpenShard(run.paths, ShardName("w0", 0)) as shard:
        headers = [shard.header_at(address.offset) for address in addresses]
    spared = 0
    for position in seeded_flips(path, 60, chance):
        hit = max(n for n, address in enumerate(addresses) if address.offset <= position)
        header = headers[hit]
        assert header is not None
        inside = position - addresses[hit].offset
        frame = next((f for f in header.frames if f.start <= inside < f.start + f.stored_bytes), None)
        asked_for = frame is None or frame.kind in frames_of(columns)
        reader = open_run(run.paths.root, columns=["tokens"])
        read = list(reader)
        assert [item.ref.ordinal for item in read] == [
            n for n in range(ROLLOUTS) if n != hit or not asked_for
        ], position
        assert reader.counts.corrupt == asked_for
        assert all(map(as_committed, read))
        assert (
            f"committed rollout {addresses[hit].ref}" in str(verify_run(run.paths.root).problems) or asked_for
        )
        assert not verify_run(run.paths.root).ok
        spared += not asked_for
    assert spared > 10


def as_committed(item: StoredTrajectory) -> bool:
    expected = trajectory(item.ref.ordinal, turns=1).tokens
    return [t.ids.tolist() for t in item.tokens] == [t.ids.tolist() for t in expected]


def test_every_flipped_bit_of_a_commit_log_is_named_and_leaves_done_in_charge(finished: Finished) -> None:
    run, _ = finished
    chance = random.Random(6)
    for number, position in enumerate(seeded_flips(run.paths.commit_log("w0", 0), 150, chance)):
        assert delivered(run, trusted=number % 2 == 0) == (list(range(ROLLOUTS)), 0), position
        if number % 5 == 0:
            report = verify_run(run.paths.root)
            assert "1 damaged marks" in report.problems[0], position
            assert (report.lost, report.committed) == (0, ROLLOUTS)
