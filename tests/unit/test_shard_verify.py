"""`verify_run` finds what breaks a promise, and counts what is merely the trace of a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcroll.contract import Trajectory
from hpcroll.shards import RecordAddress, encode_trajectory, verify_run
from hpcroll.shards.format.commit_log import pack_mark
from tests.shard_runs import ShardRun, ref, trajectory


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    run = ShardRun.create(tmp_path / "run")
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(6))
    return run


def shard(run: ShardRun) -> Path:
    return run.paths.shard_file("w0", 0)


def test_sound_run_has_no_problem(run: ShardRun) -> None:
    report = verify_run(run.paths.root)
    assert report.ok, report.problems
    assert (report.shards, report.done, report.committed, report.unmarked) == (1, 6, 6, 0)
    assert report.action_tokens == sum(trajectory(n).action_tokens for n in range(6))


def test_traces_of_a_kill_are_counted_and_are_no_problem(run: ShardRun) -> None:
    with run.writer("w1") as writer:
        run.commit(writer, "w1", [6], mark=False)
        run.commit(writer, "w1", [0])
        writer.append(trajectory(7, incarnation="w1"))
        path = writer.path
    path.write_bytes(path.read_bytes() + encode_trajectory(trajectory(8, incarnation="w1"))[:-5])
    run.end("w1")
    report = verify_run(run.paths.root)
    assert report.ok, report.problems
    assert (report.committed, report.unmarked, report.superseded, report.unconfirmed) == (7, 1, 1, 1)
    assert report.torn_bytes == len(encode_trajectory(trajectory(8, incarnation="w1"))) - 5


def test_every_flipped_bit_in_a_committed_record_is_a_problem(run: ShardRun) -> None:
    data = bytearray(shard(run).read_bytes())
    for position in range(0, len(data), len(data) // 40):
        data[position] ^= 16
        shard(run).write_bytes(bytes(data))
        assert not verify_run(run.paths.root).ok, position
        data[position] ^= 16


def _lose_shard(run: ShardRun) -> None:
    shard(run).write_bytes(b"")


def _lose_done(run: ShardRun) -> None:
    run.paths.done_link(run.leg, ref(2)).unlink()


def _damage_log(run: ShardRun) -> None:
    log = run.paths.commit_log("w0", 0)
    log.write_bytes(b"\0" * 64 + log.read_bytes()[64:])


def _mark_nothing(run: ShardRun) -> None:
    log = run.paths.commit_log("w0", 0)
    log.write_bytes(log.read_bytes() + pack_mark(RecordAddress(0, 10**6, 10, ref(3), 1, 0)))


def _append(run: ShardRun, record: Trajectory) -> None:
    shard(run).write_bytes(shard(run).read_bytes() + encode_trajectory(record))


def _append_twice(run: ShardRun) -> None:
    _append(run, trajectory(3))


def _other_incarnation(run: ShardRun) -> None:
    run.confirm(9, "w0")
    _append(run, trajectory(9, incarnation="someone"))


def _broken_invariant(run: ShardRun) -> None:
    run.confirm(9, "w0")
    _append(run, trajectory(9, rollout_weight=3.0))


def _other_run(run: ShardRun) -> None:
    run.confirm(9, "w0")
    _append(run, trajectory(9, run_id="another"))


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (_lose_shard, "no shard of it holds the record whole"),
        (_lose_done, "is marked, but `done` names nobody"),
        (_damage_log, "1 damaged marks"),
        (_mark_nothing, "where no record stands"),
        (_append_twice, "has 2 committed records"),
        (_other_incarnation, "its place says"),
        (_broken_invariant, "5: segment weights"),
        (_other_run, "of run another"),
    ],
)
def test_broken_promise_is_named(run: ShardRun, break_it: Callable[[ShardRun], None], told: str) -> None:
    break_it(run)
    report = verify_run(run.paths.root)
    assert any(told in problem for problem in report.problems), report.problems
