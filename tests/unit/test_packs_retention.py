"""Retention: level-0 shards that packs hold wholly may go, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcroll.fs import replace
from hpcroll.shards import adopt, verify_run
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.cursors import Cursors
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import RetainReport, Retention
from tests.shard_runs import ShardRun, trajectory
from tests.spools import watch_operations


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def committed(run: ShardRun, *, mark: bool = True) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8), mark=mark)
    run.end("w0")


def names(run: ShardRun) -> set[str]:
    return {path.name for path in (*run.paths.shards.iterdir(), *run.paths.adopt.iterdir())}


def retain(run: ShardRun, **options: object) -> RetainReport:
    return Retention(run.paths).retain(**options)  # type: ignore[arg-type]


def write_cursor(run: ShardRun, seen: int, pending: list[int], *, pack: int = 0, beat: int = 0) -> None:
    path = run.paths.reader_cursor("grpo")
    path.parent.mkdir(parents=True, exist_ok=True)
    cursor = {"shards": {"w0.0": [seen, pending]}, "pack": [pack, 0], "expires_s": 60, "beat": beat}
    replace(path, json.dumps(cursor).encode())


def test_what_packs_hold_wholly_goes_with_its_index(run: ShardRun) -> None:
    committed(run, mark=False)
    adopt(run.paths, "w0")
    assert names(run) == {"w0.0.shard", "w0.0.log", "w0.0.0"}
    assert retain(run).kept == {"w0.0": "no pack holds any of it"}
    Packer(run.paths).pack()
    planned = retain(run, dry_run=True)
    assert planned.deleted == ["w0.0"]
    assert names(run) == {"w0.0.shard", "w0.0.log", "w0.0.0"}
    assert retain(run).deleted == ["w0.0"]
    assert names(run) == set()
    report = verify_run(run.paths.root)
    assert (report.problems, report.committed) == ([], 8)


def test_a_shard_with_an_entry_that_may_still_be_committed_stays(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(4))
        writer.append(trajectory(4))
    run.end("w0")
    Packer(run.paths).pack()
    assert retain(run).kept == {"w0.0": "1 of its entries are not packed"}


def test_a_shard_whose_worker_lives_stays_until_a_whole_one_later(run: ShardRun) -> None:
    with run.writer("w0", shard_mb=1) as writer:
        bulk = {"turns": 1, "extra": {"bulk": ""}}
        ordinal = 0
        while not run.paths.shard_file("w0", 2).exists():
            fields = {**bulk, "extra": {"bulk": _noise(ordinal)}}
            run.commit(writer, "w0", range(ordinal, ordinal + 4), **fields)
            ordinal += 4
        Packer(run.paths).pack()
        report = retain(run)
        assert report.deleted == ["w0.0"]
        assert set(report.kept) == {"w0.1", "w0.2"}
        run.commit(writer, "w0", range(ordinal, ordinal + 4))


def _noise(seed: int) -> str:
    import random

    return random.Random(seed).randbytes(60_000).hex()


def test_a_damaged_pack_keeps_what_relies_on_it(run: ShardRun) -> None:
    committed(run)
    Packer(run.paths).pack()
    chain = PackChain(run.paths)
    chain.refresh()
    path = chain.data_file(chain[0])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = retain(run)
    assert report.deleted == []
    assert report.problems
    assert "is in no sound pack" in report.kept["w0.0"]


def test_a_cursor_keeps_what_it_still_reads_until_it_expires(run: ShardRun) -> None:
    committed(run)
    Packer(run.paths).pack()
    now = [0.0]
    retention = Retention(run.paths, cursors=Cursors(run.paths, clock=lambda: now[0]))
    write_cursor(run, 100, [])
    assert retention.retain(dry_run=True).kept == {"w0.0": "still read by grpo"}
    now[0] = 59.0
    write_cursor(run, 100, [], beat=1)
    assert retention.retain(dry_run=True).deleted == [], "it moved, so its time begins anew"
    now[0] = 118.0
    assert retention.retain(dry_run=True).deleted == []
    now[0] = 120.0
    assert retention.retain(dry_run=True).deleted == ["w0.0"]
    write_cursor(run, 100, [], beat=2)
    assert retention.retain(dry_run=True, without=["grpo"]).deleted == ["w0.0"]
    write_cursor(run, 100, [], pack=1)
    assert retention.retain(dry_run=True).deleted == ["w0.0"], "it has passed the pack"
    replace(run.paths.reader_cursor("grpo"), b"{")
    assert "cannot be read" in retention.retain().kept["w0.0"]


def test_retention_stopped_at_any_instant_leaves_a_run_that_is_whole(run: ShardRun) -> None:
    committed(run, mark=False)
    adopt(run.paths, "w0")
    Packer(run.paths, PackOptions()).pack()
    for instant in range(1000):
        left = [instant]

        def stop(*_: object, left: list[int] = left) -> None:
            if not left[0]:
                raise InterruptedError
            left[0] -= 1

        try:
            with watch_operations(stop):
                retain(run)
        except InterruptedError:
            report = verify_run(run.paths.root)
            assert (report.problems, report.committed) == ([], 8), f"instant {instant}"
        else:
            break
    assert names(run) == set()
    assert instant > 10
