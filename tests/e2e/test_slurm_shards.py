"""Shards on a real cluster: sealed by Slurm's word, by a waiting launch, and packed beside the workers.

The commands are the real ones. They run in a process namespace of their own, as on another node: nothing
but Slurm and the heartbeats can tell them whether a worker lives.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import EndReason, Stage, Task
from hpcroll.fs import RunPaths
from hpcroll.launch import read_launches
from hpcroll.shards import StoredTrajectory, open_run
from hpcroll.spool import read_worker
from tests.capabilities import need
from tests.scenario import Scenario, Sleeps
from tests.slurm_jobs import end_jobs, live_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 240.0
BRIEF = Sleeps(init=0.1, run=0.1, verify=0.1)


@pytest.fixture(autouse=True)
def _userns() -> None:
    need("userns")


def elsewhere(*arguments: str | Path) -> list[str]:
    """The command line of `hpcroll`, as on a node that sees no process of this one."""
    namespace = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*namespace, sys.executable, "-m", "hpcroll.cli", *map(str, arguments)]


def hpcroll(*arguments: str | Path, status: int = 0) -> Any:
    """What the command says with `--json`; fails unless it ends with `status`."""
    argv = elsewhere(*arguments, "--json")
    answer = subprocess.run(argv, capture_output=True, text=True, cwd=CHECKOUT, timeout=PATIENCE_S)
    assert answer.returncode == status, answer
    return json.loads(answer.stdout)


def wait_for(what: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {PATIENCE_S:g} s"
        time.sleep(0.1)


def job_ids(run: Run) -> list[str]:
    """Slurm's ids of every job that was launched for the run, oldest launch first."""
    return [handle.job_id for launch in read_launches(run.path) for handle in launch.handles]


STAND_IN = """#!/bin/bash
case "$*" in *hpcroll.worker*) ;; *) exec {python} "$@" ;; esac
export SEAL_WORKER=stays PYTHONPATH={checkout}
exec {python} -m tests.faults.seal_worker "$@"
"""


@pytest.fixture
def stayers(tmp_path: Path) -> Iterator[Run]:
    """A launched run of nine rollouts, whose three workers commit two each and stay with a third."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, checkout=CHECKOUT))
    python.chmod(0o755)
    launch = {"partition": "cpu", "cpus": 1, "memory_mb": 500, "time_min": 10, "python": str(python)}
    config = {
        "sandbox": {"name": "bwrap", "image": "host"},
        "launch": launch,
        "lease": {"beat_s": 2, "silence_s": 600, "scheduler_poll_s": 1},
    }
    run = Run.create(tmp_path / "run", config)
    tasks = [Task(task_id=name, handler="math", prompt="1+1?", spec={"answer": "2"}) for name in "abc"]
    run.submit(tasks, samples=3, key="k")
    run.launch(workers=3)
    yield run
    (run.path / "release").touch()
    end_jobs(job_ids(run))


def test_sealing_believes_slurm_of_the_dead_and_ends_nobody_who_lives(stayers: Run) -> None:
    run, paths, jobs = stayers, RunPaths(stayers.path), job_ids(stayers)
    notes = [run.path / "logs" / f"stays.{rank}" for rank in range(3)]
    wait_for("three workers that stay", lambda: all(note.exists() and note.read_text() for note in notes))
    killed, requeued, zombie = (note.read_text() for note in notes)
    wait_for("end of the job that its worker left", lambda: not live_jobs(jobs[2:]))
    assert hpcroll("shards", "verify", run.path)["unmarked"] == 3

    report = hpcroll("shards", "seal", run.path, "--close", status=1)
    assert (report["ended"], report["unsure"]) == ({}, {})
    assert report["alive"] == sorted([killed, requeued, zombie])
    assert not list(paths.workers.glob("*.ended"))

    subprocess.run(["scancel", "--signal=KILL", jobs[0]], check=True)
    wait_for("end of the killed job", lambda: not live_jobs(jobs[:1]))
    report = hpcroll("shards", "seal", run.path, "--close", status=1)
    assert list(report["ended"]) == [killed]
    assert "Slurm says that job" in report["ended"][killed]
    assert (report["alive"], report["indexed"], report["closed"]) == (sorted([requeued, zombie]), 1, False)
    assert hpcroll("shards", "verify", run.path)["unmarked"] == 2

    subprocess.run(["scontrol", "requeuehold", jobs[1]], check=True)
    process = read_worker(paths.worker_file(zombie))
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_for("job that waits to start again", lambda: "PENDING" in "".join(live_jobs(jobs[1:2])))
    assert run.cancel() == 1  # what the first one held; the others are not known to be dead
    report = hpcroll("shards", "seal", run.path, "--close")
    assert sorted(report["ended"]) == sorted([requeued, zombie])
    assert (report["indexed"], report["cancelled"], report["closed"]) == (2, 2, True)
    assert len({stored.rollout_id for stored in open_run(run.path).follow()}) == 9
    assert hpcroll("shards", "verify", run.path)["unmarked"] == 0


@pytest.fixture
def prepare(shared_run_dir: Path, serve_scripts: Callable[..., str]) -> Iterator[Callable[..., Scenario]]:
    """Makes the test's one scenario; ends it and its jobs."""
    made: list[Scenario] = []
    serve = partial(serve_scripts, options=["--context-tokens", "400000"])

    def make(*, launch: dict[str, Any], config: dict[str, Any], **rollouts: Any) -> Scenario:
        settings = {
            "sandbox": {"name": "bwrap", "image": "host"},
            "lease": {"beat_s": 1, "silence_s": 600, "scheduler_poll_s": 1},
            "launch": {"cpus": 2, "memory_mb": 1500, "time_min": 20, **launch},
            **config,
        }
        made.append(Scenario(shared_run_dir, serve, config=settings, **rollouts))
        return made[-1]

    yield make
    for scenario in made:
        scenario.run.drain()
        end_jobs(job_ids(scenario.run))
        scenario.assert_nothing_survives()


def test_waiting_launch_returns_with_the_work_done_and_sealed_though_a_worker_was_killed_for_good(
    prepare: Callable[..., Scenario],
) -> None:
    scenario = prepare(
        launch={"partition": "cpu", "idle_s": 2, "restarts": 0},
        config={"stages": {"run": {"width": 2, "timeout_s": 300}}},
        rollouts=12,
        sleeps=Sleeps(init=0.1, run=1.0, verify=0.1),
    )
    argv = elsewhere("launch", scenario.run.path, "--workers", "2", "--wait")
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as wait:
        try:
            victim = scenario.wait_for("worker that has committed and is at work", lambda: at_work(scenario))
            parent = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGKILL)  # so that nobody starts the worker again, or notes its end
            _, said = wait.communicate(timeout=PATIENCE_S)
        finally:
            wait.kill()
    assert wait.returncode == 1, said  # a worker failed
    assert f"recorded the end of {victim.incarnation}: Slurm says that job {victim.job_id} has ended" in said
    assert "0 workers live" in said
    assert "12 of 12 rollouts have their result" in said
    assert set(scenario.ends()) == {EndReason.KILL}
    scenario.assert_each_rollout_ended_once_and_well()
    assert hpcroll("shards", "verify", scenario.run.path)["unmarked"] == 0
    assert hpcroll("shards", "seal", scenario.run.path, "--close")["closed"]
    assert len({stored.rollout_id for stored in open_run(scenario.run.path).follow()}) == 12


def at_work(scenario: Scenario) -> Any:
    """A worker that runs a rollout now and has committed another one before."""
    committers = {event.incarnation for event in scenario.events() if event.event == "committed"}
    return scenario.in_stage(Stage.RUN, on=lambda worker: worker.incarnation in committers)


def test_packs_are_made_beside_the_last_legs_workers_and_change_nothing_that_is_read(
    prepare: Callable[..., Scenario],
) -> None:
    scenario = prepare(
        launch={"partition": {"init+run": "run", "eval": "eval"}, "idle_s": 600},
        config={
            "legs": [["init", "run"], ["eval"]],
            "model": {"context_tokens": 400_000},
            "harness": {"output_bytes": 400_000},
            "shards": {"pack": "auto", "pack_mb": 1, "shard_mb": 1, "retain": True},
        },
        rollouts=24,
        samples=4,
        prints_bytes=150_000,
        sleeps=BRIEF,
    )
    run, given_up = scenario.run, threading.Event()
    follower = open_run(run.path).follow(trainer="grpo", stop=given_up.is_set)
    early = open_run(run.path).follow(stop=given_up.is_set)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: list(map(seen, follower)))
        try:
            scenario.launch(workers=2)
            first = list(map(seen, islice(early, 3)))
            state = json.loads(json.dumps(early.state_dict()))
            scenario.wait_for_all()
            scenario.wait_for("shards that were packed and deleted", lambda: "deleted: " in log(run, "eval"))
            run.close()
            read = reading.result(PATIENCE_S)
        finally:
            given_up.set()
    run.drain()
    wait_for("end of every job", lambda: not live_jobs(job_ids(run)))
    assert "packed: " in log(run, "eval")
    assert "packed: " not in log(run, "init+run")
    scenario.assert_each_rollout_ended_once_and_well()
    hpcroll("shards", "pack", run.path, "--retain")  # what was ready when the workers ended
    checked = hpcroll("shards", "verify", run.path)
    assert (checked["packed"], checked["unmarked"], checked["orphans"]) == (24, 0, 0)
    assert not any(path.stat().st_size for path in scenario.paths.shards.glob("*.shard"))
    late = open_run(run.path)
    late.load_state_dict(state)
    whole = dict(map(seen, open_run(run.path)))
    for delivered in (read, [*first, *map(seen, late)]):
        assert len(delivered) == len(whole) == 24
        assert dict(delivered) == whole


def seen(stored: StoredTrajectory) -> tuple[str, str]:
    """The rollout and a digest of its tokens and its record."""
    digest = hashlib.sha256(stored.record.to_json().encode())
    for segment in stored.tokens:
        digest.update(segment.ids.tobytes() + segment.logprobs.tobytes() + segment.loss_mask.tobytes())
    return stored.rollout_id, digest.hexdigest()


def log(run: Run, leg: str) -> str:
    """What the ranks of `leg` wrote."""
    folders: Sequence[Path] = [item.directory for item in read_launches(run.path) if item.record.leg == leg]
    return "\n".join(path.read_text() for folder in folders for path in sorted(folder.glob("*.out")))
