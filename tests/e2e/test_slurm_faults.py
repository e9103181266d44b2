"""Faults on a real cluster: whatever is killed, each rollout ends once, and well."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcroll.contract import EndReason, Stage
from hpcroll.spool import WorkerInfo
from tests.capabilities import IMAGES
from tests.scenario import Scenario, Sleeps
from tests.slurm_jobs import end_jobs

pytestmark = [pytest.mark.slurm, pytest.mark.apptainer, pytest.mark.timeout(900)]

ONE_LEG = [["init", "run", "eval"]]
TWO_LEGS = [["init", "run"], ["eval"]]
SHORT = Sleeps()
DEVCLUSTER = "/usr/local/lib/hpcroll/devcluster/devcluster"


def config(
    *, legs: list[list[str]] = ONE_LEG, launch: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    partition: Any = "cpu" if len(legs) == 1 else {"init+run": "run", "eval": "eval"}
    return {
        "legs": legs,
        "sandbox": {"name": "apptainer", "image": str(IMAGES / "base")},
        "stages": {stage: {"width": 2, "timeout_s": 300} for stage in ("init", "run", "eval")},
        "lease": {"beat_s": 1, "silence_s": 600, "scheduler_poll_s": 1},
        "launch": {
            "launcher": "slurm",
            "partition": partition,
            "cpus": 2,
            "memory_mb": 1500,
            "time_min": 20,
            "idle_s": 2,
            **(launch or {}),
        },
        **more,
    }


@pytest.fixture
def start(shared_run_dir: Path, serve_scripts: Callable[..., str]) -> Iterator[Callable[..., Scenario]]:
    """Starts a scenario with `workers` per leg; drains it and waits for its jobs at the end."""
    started: list[Scenario] = []

    def launch(*, rollouts: int, workers: int, sleeps: Sleeps = SHORT, **settings: Any) -> Scenario:
        scenario = Scenario(
            shared_run_dir, serve_scripts, rollouts=rollouts, config=config(**settings), sleeps=sleeps
        )
        started.append(scenario)
        scenario.launch(workers=workers)
        return scenario

    yield launch
    for scenario in started:
        scenario.run.drain()
        end_jobs(jobs_of(scenario))
        scenario.assert_nothing_survives()


def jobs_of(scenario: Scenario) -> list[str]:
    """Slurm's ids of the scenario's jobs."""
    return [handle.job_id for handle in scenario.handles]


@pytest.mark.parametrize("legs", [ONE_LEG, TWO_LEGS], ids=["one-leg", "two-legs"])
@pytest.mark.parametrize("stage", list(Stage))
def test_a_worker_killed_in_any_stage_loses_nothing(
    start: Callable[..., Scenario], stage: Stage, legs: list[list[str]]
) -> None:
    scenario = start(rollouts=6, workers=1, legs=legs)
    victim = scenario.wait_for(f"worker in {stage}", lambda: scenario.in_stage(stage))
    scenario.kill(victim)
    scenario.wait_for_all()
    scenario.assert_each_rollout_ended_once_and_well()
    assert set(scenario.ends()) == {EndReason.KILL}
    assert any(event.event == f"{stage}.start" for event in scenario.events())


def test_a_zombie_on_a_node_that_slurm_gave_up_loses(start: Callable[..., Scenario]) -> None:
    scenario = start(rollouts=6, workers=2, sleeps=Sleeps(run=6.0), launch={"cpus": 3})
    on_both = scenario.wait_for("worker on each node", lambda: workers_by_node(scenario))
    node, zombie = sorted(on_both.items())[0]
    scenario.wait_for("rollout on the node", lambda: scenario.in_stage(Stage.RUN, on=lambda w: w == zombie))
    scenario.kill(zombie, signal.SIGSTOP)  # asleep, so that it is still at work when the others are done
    subprocess.run(["sudo", "-n", DEVCLUSTER, "slurmd-kill", node], check=True)
    try:
        scenario.wait_for_all()  # its heartbeat may stand still for 600 s: only Slurm's word can do this
        scenario.kill(zombie, signal.SIGCONT)
        scenario.wait_for("defeat of the zombie", lambda: lost_by(scenario, zombie))
        scenario.assert_each_rollout_ended_once_and_well()
        held = {event.fields["rollout"] for event in lost_by(scenario, zombie)}
        assert held
        winners = {record.incarnation for record in committed_records(scenario) if record.rollout_id in held}
        assert zombie.incarnation not in winners
    finally:
        subprocess.run(["sudo", "-n", DEVCLUSTER, "slurmd-start", node], check=True)


def test_a_requeued_job_spends_no_retry(start: Callable[..., Scenario]) -> None:
    scenario = start(rollouts=6, workers=1, sleeps=Sleeps(run=4.0))
    scenario.wait_for("rollout at work", lambda: scenario.in_stage(Stage.RUN))
    subprocess.run(["scontrol", "requeue", *jobs_of(scenario)], check=True)
    scenario.wait_for_all()
    scenario.assert_each_rollout_ended_once_and_well()
    assert set(scenario.ends()) == {EndReason.RELEASED}


def test_a_preempted_worker_comes_back_and_spends_no_retry(start: Callable[..., Scenario]) -> None:
    scenario = start(rollouts=8, workers=2, sleeps=Sleeps(run=4.0))
    scenario.wait_for("rollout at work", lambda: scenario.in_stage(Stage.RUN))
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    job = subprocess.run([*urgent, "--wrap=sleep 5"], check=True, capture_output=True, text=True).stdout
    try:
        scenario.wait_for("release of what was at work", lambda: scenario.ends()[EndReason.RELEASED])
        scenario.wait_for_all(timeout_s=600)
    finally:
        subprocess.run(["scancel", "--quiet", job.strip()], check=False)
    scenario.assert_each_rollout_ended_once_and_well()
    assert set(scenario.ends()) == {EndReason.RELEASED}


def test_a_time_limit_ends_no_rollout(start: Callable[..., Scenario]) -> None:
    # Slurm may send its warning up to a minute earlier than asked for; work is left until after the latest.
    limit = {"time_min": 2, "signal_s": 20}
    scenario = start(rollouts=24, workers=1, sleeps=Sleeps(run=10.0), launch=limit)
    scenario.wait_for("drain before the time limit", lambda: scenario.ends()[EndReason.RELEASED])
    scenario.wait_for_all(timeout_s=600)
    scenario.assert_each_rollout_ended_once_and_well()
    assert set(scenario.ends()) == {EndReason.RELEASED}


def workers_by_node(scenario: Scenario) -> dict[str, WorkerInfo] | None:
    """The workers by their Slurm node, once there is one on each of two nodes."""
    infos = [scenario.worker(path.stem) for path in scenario.paths.workers.glob("*.json")]
    nodes = {info.host: info for info in infos if info is not None and info.role == "worker"}
    return nodes if len(nodes) == 2 else None


def lost_by(scenario: Scenario, worker: WorkerInfo) -> list[Any]:
    return [
        event
        for event in scenario.events()
        if event.event == "lost" and event.incarnation == worker.incarnation
    ]


def committed_records(scenario: Scenario) -> list[Any]:
    return [result.trajectory().record for result in scenario.run.results("scenario", wait=False)]
