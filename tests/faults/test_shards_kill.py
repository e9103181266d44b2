"""A writer dies at any instruction: what `done` names is read exactly once, and nothing else is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcroll.shards import adopt, open_run, verify_run
from tests.shard_runs import SEGMENT, ShardRun, ref, trajectory

KILLS = 10
ROLLOUTS = 40

WORKER = f"""
import random, sys
from pathlib import Path
from tests.shard_runs import ShardRun, ref, trajectory

root, incarnation, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
run = ShardRun.open(root)
todo = [n for n in range({ROLLOUTS}) if not run.paths.done_link(run.leg, ref(n)).exists()]
random.Random(seed).shuffle(todo)
made = {{n: trajectory(n, incarnation=incarnation, turns=2) for n in todo}}
with run.writer(incarnation) as writer:
    print("ready", flush=True)
    for n in todo:
        address = writer.append(made[n])
        writer.sync()
        if run.confirm(n, incarnation):
            writer.mark([address])
    print("drained", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


Start = Callable[[str, int], subprocess.Popen[str]]


@pytest.fixture
def start(run: ShardRun) -> Iterator[Start]:
    """Starts writers; those that a failing test leaves behind are killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(incarnation: str, seed: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(run.paths.root), incarnation, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        kill(process)


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return (line.strip() for line in process.stdout)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()  # SIGKILL, to this process alone
    process.wait(timeout=60)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def committed(run: ShardRun) -> dict[int, str]:
    """Who committed what, straight from the names."""
    directory = run.paths.done_directory(run.leg, ref(0))
    return {int(path.name): json.loads(path.read_bytes())["incarnation"] for path in directory.glob("*")}


def assert_reads_what_is_done(run: ShardRun) -> None:
    done = committed(run)
    for trusted in (False, True):
        reader = open_run(run.paths.root, trust_marks=trusted)
        delivered = [(item.ref.ordinal, item.incarnation) for item in reader]
        assert sorted(delivered) == sorted(done.items())
        assert reader.counts.committed_lost == 0
    for item in open_run(run.paths.root):
        n = item.ref.ordinal
        assert item.record == trajectory(n, incarnation=item.incarnation, turns=2).record
    report = verify_run(run.paths.root)
    assert report.ok, report.problems
    assert report.committed == len(done)


def test_writers_killed_at_random_points_lose_and_double_nothing(run: ShardRun, start: Start) -> None:
    chance = random.Random(7)
    for number in range(KILLS):
        incarnation = f"w{number}"
        writer = start(incarnation, number)
        told = lines(writer)
        assert next(told) == "ready"
        # Killed while it commits: the wait is for a random amount of its work, not for time.
        target = len(committed(run)) + chance.randrange(3)
        while len(committed(run)) < min(target, ROLLOUTS) and writer.poll() is None:
            time.sleep(0.001)
        kill(writer)
        assert_reads_what_is_done(run)
        run.end(incarnation)
        assert_reads_what_is_done(run)
        adopt(run.paths, incarnation)
        assert_reads_what_is_done(run)
    writer = start("last", 99)
    told = lines(writer)
    assert next(told) == "ready"
    assert next(told) == "drained"
    kill(writer)
    run.end("last")
    assert_reads_what_is_done(run)
    assert sorted(committed(run)) == list(range(ROLLOUTS))


def test_two_writers_that_race_and_a_follower_see_every_rollout_once(run: ShardRun, start: Start) -> None:
    writers = [start(f"w{number}", number) for number in range(2)]
    assert [next(lines(writer)) for writer in writers] == ["ready", "ready"]
    seen: list[str] = []
    follower = open_run(run.paths.root).follow(
        poll_s=0.02, stop=lambda: all(writer.poll() is not None for writer in writers)
    )
    for item in follower:
        assert item.record == trajectory(item.ref.ordinal, incarnation=item.incarnation, turns=2).record
        seen.append(item.rollout_id)
        if len(seen) == ROLLOUTS:
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.close()  # they end, and with them the stream
    assert sorted(seen) == sorted(f"{SEGMENT}/{n}" for n in range(ROLLOUTS))
    assert_reads_what_is_done(run)


def test_follower_outlives_writers_that_are_killed_under_it(run: ShardRun, start: Start) -> None:
    """The follower starts before anything is there and resumes from a saved state after each kill."""
    seen: list[str] = []
    state = None
    for number in range(4):
        writer = start(f"w{number}", number)
        assert next(lines(writer)) == "ready"
        goal = min(len(seen) + 7, ROLLOUTS)
        follower = open_run(run.paths.root).follow(poll_s=0.01)
        if state is not None:
            follower.load_state_dict(state)
        for item in follower:
            seen.append(item.rollout_id)
            if len(seen) >= goal:
                break
        state = follower.state_dict()
        kill(writer)
        run.end(f"w{number}")
    rest = open_run(run.paths.root).follow(poll_s=0.01, stop=lambda: True)
    assert state is not None
    rest.load_state_dict(state)
    seen += [item.rollout_id for item in rest]
    assert len(seen) == len(set(seen))
    assert sorted(seen) == sorted(f"{SEGMENT}/{n}" for n in committed(run))
