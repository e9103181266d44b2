"""A pool with real workers and a trainer that is killed on the way: nothing twice, all adds up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import RolloutRef, Status, Task
from hpcroll.fs import RunPaths
from hpcroll.launch import JobState
from hpcroll.shards import open_run, verify_run
from hpcroll.testing.policy_server import Script, fails, solves, stalls
from tests.capabilities import need

WAIT_S = 300.0
SAMPLES, STEPS, AHEAD = 4, 4, 4
SIZE = {"samples": SAMPLES, "groups_per_step": 2, "oversample": 1.5, "steps": STEPS, "min_usable": 3}
SPEC = {"verify": ["sh", "-c", "cp answer.txt reward.txt || echo 0 > reward.txt"]}


@pytest.fixture(autouse=True)
def _bwrap() -> None:
    need("bwrap")


TRAINER = f"""
import json, sys
from pathlib import Path
from hpcroll.api import Run
from hpcroll.shards import open_run

root, state, kill_at = Path(sys.argv[1]), Path(sys.argv[3]), int(sys.argv[4])
run = Run.open(root)
run.policy.window(groups={AHEAD})
pool = run.replenish(sys.argv[2], key="pool", **{SIZE})
reader = open_run(root, columns=("tokens",)).follow(trainer="grpo", min_usable=3)
if state.exists():
    reader.load_state_dict(json.loads(state.read_text()))
pool.__enter__()
for step in reader.steps(groups=2, max_tokens=1_000_000, drop_zero_variance=True):
    pool.after(step)
    groups = [group.group_id for group in step.groups]
    print(json.dumps({{"step": step.number, "groups": groups}}), flush=True)
    if step.number == kill_at:
        sys.stdin.read()
    run.policy.publish(step.number, weights=f"ckpt/{{step.number}}")
    new = state.with_suffix(".new")
    new.write_text(json.dumps(reader.state_dict()))
    new.replace(state)
    if step.number == {STEPS}:
        break
pool.__exit__(None, None, None)
"""


def tasks() -> list[Task]:
    return [
        Task(
            task_id=f"t{n}", handler="command", prompt=f"Write 1 into answer.txt. Number {n:03d}.", spec=SPEC
        )
        for n in range(5)
    ]


@pytest.fixture
def run(tmp_path: Path, serve_scripts: Callable[..., str]) -> Run:
    chances = (solves(["echo 1 > answer.txt"], "done", weight=5), fails(weight=4), stalls(600, weight=1))
    scripts = [Script(prompt=task.prompt, behaviours=chances) for task in tasks()]
    config = {
        "model": {"endpoints": [serve_scripts(scripts)]},
        "sandbox": {"name": "bwrap", "image": "host"},
        "stages": {
            "init": {"width": 8, "timeout_s": 120},
            "run": {"width": 8, "timeout_s": 60},
            "on_timeout": "mask",
        },
        "lease": {"beat_s": 0.5, "silence_s": 60},
        "launch": {"launcher": "local", "idle_s": 2},
    }
    return Run.create(tmp_path / "run", config=config)


def write_tasks(run: Run) -> Path:
    file = run.path.parent / "tasks.jsonl"
    file.write_text("".join(f"{task.to_json()}\n" for task in tasks()))
    return file


def train(run: Run, *, kill_at: int = 0) -> list[dict[str, Any]]:
    """What a trainer says that lives until it has taken step `kill_at`, before it saved its state."""
    folder, file = run.path.parent, write_tasks(run)
    argv = [sys.executable, "-c", TRAINER, str(run.path), str(file), str(folder / "state"), str(kill_at)]
    said = []
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        limit = threading.Timer(WAIT_S, trainer.kill)
        limit.start()
        assert trainer.stdout is not None
        for line in trainer.stdout:
            said.append(json.loads(line))
            if said[-1]["step"] == kill_at:
                trainer.kill()
        limit.cancel()
        assert trainer.wait() == (-signal.SIGKILL if kill_at else 0), said
    return said


def started(run: Run) -> int:
    """How many groups were started."""
    paths, leg = RunPaths(run.path), run.config.leg_names[0]
    found = set()
    for segment in run.submissions:
        directory = paths.claim_directory(leg, RolloutRef(segment=segment.name, ordinal=0))
        names = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
        found |= {(segment.name, int(name.partition(".")[0]) // SAMPLES) for name in names}
    return len(found)


@pytest.fixture
def watched(run: Run) -> Iterator[list[str]]:
    """Complaints of somebody who compares, all the time, what is started with what may be."""
    complaints: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        other = Run.open(run.path)
        while not stop.wait(0.1):
            count = started(other)
            limit = other.policy.allowance().limit  # read last: it only grows
            if limit is not None and count > limit:
                complaints.append(f"{count} groups were started, {limit} were allowed")

    thread = threading.Thread(target=watch)
    thread.start()
    yield complaints
    stop.set()
    thread.join()


def test_pool_of_a_trainer_that_is_killed_adds_up_and_ends_clean(run: Run, watched: list[str]) -> None:
    # Filled before the workers start, which would find nothing and end.
    with run.replenish(write_tasks(run), key="pool", **SIZE):
        run.launch(workers=2)
    first = train(run, kill_at=2)
    assert [said["step"] for said in first] == [1, 2]
    second = train(run)
    assert [said["step"] for said in second] == [2, 3, 4], "step 2 was never saved, so that it comes again"
    assert second[0] == first[1], "with the same groups"
    groups = [group for said in (*first[:1], *second) for group in said["groups"]]
    assert len(groups) == len(set(groups)) == 2 * STEPS

    lines = run.policy.pools()["pool"]
    steps = [line.step for line in lines if not line.between]
    assert steps == [0, 1, 2, 3, 4], "one line per step, whoever took it"
    for line in lines:
        assert line.fates.submitted == line.fates.settled + line.fates.open
        assert line.fates.delivered == 2 * line.step
    total = sum(segment.header.tasks for segment in run.submissions)
    assert lines[-1].submitted == total == sum(line.added for line in lines)
    assert len(run.submissions) == sum(len(line.parts) for line in lines)
    assert not watched

    deadline = time.monotonic() + WAIT_S
    while sum(1 for _ in run.results(wait=False)) < total * SAMPLES:
        assert time.monotonic() < deadline, "not everything ends"
        time.sleep(0.2)
    while any(state in (JobState.PENDING, JobState.RUNNING) for state in run.job_states()):
        assert time.monotonic() < deadline, "the workers stay"
        time.sleep(0.2)
    results = list(run.results(wait=False))
    assert len({result.rollout_id for result in results}) == len(results) == total * SAMPLES
    report = verify_run(run.path)
    assert report.ok, report
    stored = {item.rollout_id: item for item in open_run(run.path, columns=())}
    cancelled = {item.group_id for item in stored.values() if item.status is Status.CANCELLED}
    needless = {group for line in lines for group in (*line.surplus, *line.cancelled)}
    assert cancelled <= needless, "nothing else was cancelled"
    assert cancelled, "a pool with more groups than steps need always has some left"
