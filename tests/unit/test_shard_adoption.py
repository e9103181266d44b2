"""Adoption indexes what a dead worker committed and did not mark, beside its files, never in them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpcroll.shards import adopt, open_run
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.level0.shard_file import marks_of
from tests.shard_runs import ShardRun, bulk


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def marked(run: ShardRun, index: int = 0) -> list[int]:
    return sorted(mark.ref.ordinal for mark in marks_of(run.paths, ShardName("w0", index)).values())


def test_unmarked_committed_records_are_indexed_once(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0, 1])
        addresses = run.commit(writer, "w0", [2, 3], mark=False)
        log, shard = run.paths.commit_log("w0", 0).read_bytes(), writer.path.read_bytes()
    run.end("w0")
    assert adopt(run.paths, "w0") == 2
    assert adopt(run.paths, "w0") == 0
    found = marks_of(run.paths, ShardName("w0", 0))
    assert [found[address.offset] for address in addresses] == addresses
    assert marked(run) == [0, 1, 2, 3]
    assert run.paths.commit_log("w0", 0).read_bytes() == log
    assert run.paths.shard_file("w0", 0).read_bytes() == shard
    assert [item.ref.ordinal for item in open_run(run.paths.root, trust_marks=True)] == [0, 1, 2, 3]


def test_records_that_lost_or_are_torn_are_left_out(run: ShardRun) -> None:
    with run.writer("w0") as writer, run.writer("w1") as other:
        run.commit(other, "w1", [0])
        run.commit(writer, "w0", [0, 1, 2], mark=False)
        path = writer.path
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert adopt(run.paths, "w0") == 1
    assert marked(run) == [1]


def test_several_shards_of_one_incarnation_are_adopted(run: ShardRun) -> None:
    with run.writer("w0", shard_mb=1) as writer:
        for n in range(20):
            run.commit(writer, "w0", [n], mark=False, **bulk(n))
    assert adopt(run.paths, "w0") == 20
    assert marked(run, 0) + marked(run, 1) == list(range(20))


def test_two_adopters_at_once_are_harmless(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(10), mark=False, turns=1)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        adopt(run.paths, "w0")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert marked(run) == list(range(10))
    assert len(list(open_run(run.paths.root))) == 10


def test_owner_that_was_only_paused_goes_on(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", [0], mark=False)
        assert adopt(run.paths, "w0") == 1
        writer.mark(addresses)
        run.commit(writer, "w0", [1])
    assert [item.ref.ordinal for item in open_run(run.paths.root)] == [0, 1]
    assert adopt(run.paths, "w0") == 0


def test_incarnation_without_a_shard_has_nothing_to_adopt(run: ShardRun) -> None:
    assert adopt(run.paths, "nobody") == 0
