"""A finished shard is cut or flipped anywhere: the damage is noticed, the other records are read once."""

from __future__ import annotations

import random

import pytest

from hpcroll.shards import RecordAddress, open_run, verify_run
from tests.shard_runs import ShardRun

ROLLOUTS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardRun, list[RecordAddress]]:
    run = ShardRun.create(tmp_path_factory.mktemp("damage") / "run")
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", range(ROLLOUTS), turns=1)
    run.end("w0")
    return run, addresses


def delivered(run: ShardRun, *, trusted: bool) -> tuple[list[int], int]:
    reader = open_run(run.paths.root, trust_marks=trusted)
    return [item.ref.ordinal for item in reader], reader.counts.corrupt


@pytest.mark.parametrize("trusted", [False, True])
def test_cut_anywhere_keeps_the_records_before_it(
    finished: tuple[ShardRun, list[RecordAddress]], trusted: bool
) -> None:
    run, addresses = finished
    path = run.paths.shard_file("w0", 0)
    whole = path.read_bytes()
    chance = random.Random(3)
    ends = [address.offset + address.length for address in addresses]
    try:
        for length in (0, 1, *ends, *(chance.randrange(len(whole)) for _ in range(150))):
            path.write_bytes(whole[:length])
            kept = [n for n, end in enumerate(ends) if end <= length]
            at_boundary = length in (0, *ends)
            assert delivered(run, trusted=trusted) == (kept, 0 if at_boundary else 1), length
            assert verify_run(run.paths.root).ok == (len(kept) == ROLLOUTS), length
            path.write_bytes(whole[:length] + b"\0" * (len(whole) - length))
            assert delivered(run, trusted=trusted)[0] == kept, length
    finally:
        path.write_bytes(whole)


def test_every_flipped_bit_is_noticed_and_costs_one_record(
    finished: tuple[ShardRun, list[RecordAddress]],
) -> None:
    run, addresses = finished
    path = run.paths.shard_file("w0", 0)
    whole = bytearray(path.read_bytes())
    chance = random.Random(5)
    try:
        for position in sorted(chance.sample(range(len(whole)), 400)):
            whole[position] ^= (flip := 1 << chance.randrange(8))
            path.write_bytes(whole)
            hit = max(n for n, address in enumerate(addresses) if address.offset <= position)
            others = [n for n in range(ROLLOUTS) if n != hit]
            assert delivered(run, trusted=False) == (others, 1), position
            whole[position] ^= flip
    finally:
        path.write_bytes(whole)


def test_every_flipped_bit_of_a_commit_log_leaves_done_in_charge(
    finished: tuple[ShardRun, list[RecordAddress]],
) -> None:
    run, _ = finished
    log = run.paths.commit_log("w0", 0)
    whole = bytearray(log.read_bytes())
    chance = random.Random(6)
    try:
        for position in range(len(whole)):
            whole[position] ^= (flip := 1 << chance.randrange(8))
            log.write_bytes(whole)
            assert delivered(run, trusted=position % 2 == 0) == (list(range(ROLLOUTS)), 0)
            whole[position] ^= flip
    finally:
        log.write_bytes(whole)
