"""Exports and the bridge to prime-rl, killed at any moment: no part is lost, repeated or different."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcroll.contract import Trajectory
from hpcroll.exporters import export_run
from hpcroll.fs import publish
from hpcroll.policy import PolicyRegistry
from hpcroll.shards import ShardWriter, open_run
from tests import prime_rl_trainer
from tests.faults.instants import killed_at
from tests.shard_runs import ShardRun

GROUP_SIZE = 4
GROUPS = 24
PER_STEP = 2
WORLD = 2
DEADLINE_S = 120.0
STRIDE = int(os.environ.get("HPCROLL_INSTANT_STRIDE", "7"))
"""Every so many-th system call is tried; 1 tries all."""

EXPORT = """
import sys
from hpcroll.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes; those that a failing test leaves behind are killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(*argv: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, *map(str, argv)]))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def wait_for(happened: Callable[[], bool], *living: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        for process in living:
            assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        time.sleep(0.01)


def commit(run: ShardRun, writer: ShardWriter, group: int) -> None:
    ordinals = range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
    run.commit(writer, "w0", ordinals, turns=3, group_size=GROUP_SIZE)


def rows(run: ShardRun) -> list[str]:
    """The sequences that a trainer of this run must get, in any order."""
    usable = [s.trajectory() for s in open_run(run.paths.root) if s.summary.usable]
    return sorted(key(t, i) for t in usable for i, a in enumerate(t.tokens) if a.loss_mask.any())


def key(trajectory: Trajectory, index: int) -> str:
    arrays = trajectory.tokens[index]
    return json.dumps([arrays.ids.tolist(), arrays.loss_mask.astype(bool).tolist()])


def steps_in(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def bridge(run: ShardRun, out: Path) -> list[object]:
    options = ["-o", f"world={WORLD}", "-o", f"groups={PER_STEP}", "-o", "seq_len=4096"]
    return [
        "-c",
        EXPORT,
        "shards",
        "export",
        run.paths.root,
        "--to",
        "prime-rl",
        "--out",
        out,
        "--follow",
        *options,
    ]


def trainer(out: Path, first_step: int, log: Path) -> list[object]:
    return [prime_rl_trainer.__file__, out, WORLD, first_step, log]


def test_the_bridge_feeds_a_live_trainer_and_both_are_killed_on_the_way(
    run: ShardRun, start: Start, tmp_path: Path
) -> None:
    """Each step once and in order, each rollout once, each version published: whoever dies when."""
    out, log, rng = tmp_path / "out", tmp_path / "log", random.Random(5)
    feeding, training = start(*bridge(run, out)), start(*trainer(out, 1, log))
    kills = 0
    with run.writer("w0") as writer:
        for group in range(GROUPS):
            commit(run, writer, group)
            expected = (group + 1) // PER_STEP
            if group % 4 == 3:
                # In the middle of whatever it does; afterwards it goes on from the disk alone.
                time.sleep(rng.random() * 0.3)  # when to kill, not what to wait for
                feeding.kill()
                feeding.wait()
                kills += 1
                feeding = start(*bridge(run, out))
            if group % 12 == 7:
                training.kill()
                training.wait()
                done = steps_in(log)
                training = start(*trainer(out, 1 + (done[-1]["step"] if done else 0), log))
            wait_for(lambda wanted=expected: len(steps_in(log)) >= wanted - 1, feeding, training)
    publish(run.paths.closed, b"{}")
    wait_for(lambda: feeding.poll() is not None)
    assert feeding.returncode == 0
    wait_for(lambda: len(steps_in(log)) >= GROUPS // PER_STEP, training)
    (out / "stop").touch()
    wait_for(lambda: training.poll() is not None)
    assert training.returncode == 0

    # A trainer that died after its log and before its broadcast trains on a step again, on the same rows.
    given: dict[int, str] = {}
    for step in steps_in(log):
        assert given.setdefault(step["step"], json.dumps(step)) == json.dumps(step)
    assert list(given) == list(range(1, GROUPS // PER_STEP + 1))
    assert sorted(json.dumps(s) for step in given.values() for s in json.loads(step)["sequences"]) == rows(
        run
    )
    assert kills == 6
    versions = [entry.version for entry in PolicyRegistry(run.paths).versions()]
    assert versions == sorted(set(versions))
    assert versions[-1] >= GROUPS // PER_STEP - 2


def test_no_step_runs_further_ahead_of_the_trainer_than_its_rule_allows(
    run: ShardRun, start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with run.writer("w0") as writer:
        for group in range(GROUPS):
            commit(run, writer, group)

    def written() -> set[str]:
        return {path.parent.name for path in out.glob("rollouts/step_*/rank_1.bin")}

    feeding = start(*bridge(run, out))
    wait_for(lambda: written() == {"step_1"}, feeding)
    registry = PolicyRegistry(run.paths)
    for version in range(4):
        # Step N waits for version N - 2: with `version` stable, steps up to version + 2 may be written.
        folder = out / "broadcasts" / f"step_{version}"
        folder.mkdir(parents=True)
        assert registry.latest() is None or registry.latest().version == version - 1
        (folder / "STABLE").touch()
        expected = {f"step_{step}" for step in range(1, version + 3)}
        wait_for(lambda wanted=expected: written() == wanted, feeding)
        latest = registry.latest()
        assert latest is not None
        assert (latest.version, latest.weights) == (version, str(folder.absolute()))
    feeding.kill()
    feeding.wait()
    assert written() == {f"step_{step}" for step in range(1, 6)}


def test_steps_that_a_restarted_trainer_removed_are_written_again(
    run: ShardRun, start: Start, tmp_path: Path
) -> None:
    """A trainer that starts anew clears `rollouts/` after the step that it resumes from."""
    out = tmp_path / "out"
    with run.writer("w0") as writer:
        for group in range(GROUPS):
            commit(run, writer, group)
    prime_rl_trainer.broadcast(out, 0)
    prime_rl_trainer.broadcast(out, 1)
    feeding = start(*bridge(run, out))
    newest = out / "rollouts" / "step_3" / "rank_1.bin"
    wait_for(newest.exists, feeding)
    before = newest.read_bytes()
    for step in (1, 2, 3):
        shutil.rmtree(out / "rollouts" / f"step_{step}")
    wait_for(newest.exists, feeding)
    wait_for((out / "rollouts" / "step_2" / "rank_1.bin").exists, feeding)
    assert newest.read_bytes() == before
    # Version 1 is stable: nobody wants step 1 any more.
    assert not (out / "rollouts" / "step_1").exists()


@pytest.mark.parametrize("to", ["jsonl", "trl"])
def test_a_following_export_is_killed_again_and_again(
    run: ShardRun, start: Start, tmp_path: Path, to: str
) -> None:
    out, rng = tmp_path / "out", random.Random(11)
    argv: list[object] = [
        "-c",
        EXPORT,
        "shards",
        "export",
        run.paths.root,
        "--to",
        to,
        "--out",
        out,
        "--follow",
    ]
    argv += ["--part-tokens", "3000"]
    with run.writer("w0") as writer:
        for group in range(GROUPS // 2):
            exporting = start(*argv)
            commit(run, writer, group)
            if group % 3 == 2:
                count = len(list(out.glob("part-*")))
                wait_for(lambda known=count: len(list(out.glob("part-*"))) > known, exporting)
            time.sleep(rng.random() * 0.5)  # when to kill, not what to wait for
            exporting.kill()
            exporting.wait()
    publish(run.paths.closed, b"{}")
    last = start(*argv)
    wait_for(lambda: last.poll() is not None)
    assert last.returncode == 0
    whole = tmp_path / "whole"
    counts = export_run(run.paths.root, to, whole)
    assert counts.rollouts == GROUP_SIZE * (GROUPS // 2)
    assert sorted(entries(out, to)) == sorted(entries(whole, to))


@pytest.mark.parametrize("to", ["jsonl", "prime-rl"])
def test_an_export_killed_at_any_system_call_ends_with_the_same_bytes(
    run: ShardRun, tmp_path: Path, to: str
) -> None:
    with run.writer("w0") as writer:
        for group in range(4):
            commit(run, writer, group)
    options = {"groups": 1, "world": WORLD} if to == "prime-rl" else {}

    def export(out: Path) -> dict[str, bytes]:
        export_run(run.paths.root, to, out, options=options, part_tokens=1000)
        paths = [path for path in out.rglob("*") if path.is_file()]
        files = {str(path.relative_to(out)): path.read_bytes() for path in paths}
        return {name: data for name, data in files.items() if not name.startswith(".hpcroll")}

    expected = export(tmp_path / "whole")
    assert len(expected) >= 4
    for instant in itertools.count(1, STRIDE):
        out = tmp_path / str(instant)
        killed = killed_at(instant, out, lambda where=out: export(where))
        left = export(out)
        assert left == expected, f"killed at call {instant}"
        shutil.rmtree(out)
        if not killed:
            break
    assert instant > 20


def entries(out: Path, to: str) -> list[str]:
    if to == "jsonl":
        return [line for path in out.glob("part-*.jsonl") for line in path.read_text().splitlines()]
    from pyarrow import parquet

    return [
        json.dumps(row) for path in out.glob("part-*.parquet") for row in parquet.read_table(path).to_pylist()
    ]
