"""The Slurm launcher on a real cluster: who comes back after a stop, and who does not.

The worker is a stand-in that notes how it was started and stopped; submitit, srun, signals, the requeue and
the run directory are real, and the run has work left that nobody does.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import Task
from hpcroll.errors import SubmitError
from hpcroll.launch import JobHandle, JobState, read_launches

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

WAIT_S = 300.0
"""A requeued job may not start again for a while; tests wait on the state, not on a time."""


class Cluster:
    """A run with one unsolved task, launched with a stand-in for the worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.python = folder / "python"
        self.python.write_text(STAND_IN.format(notes=self.notes, python=sys.executable))
        self.python.chmod(0o755)
        self.handles: list[JobHandle] = []

    def launch(self, *, workers: int = 1, **launch: Any) -> Run:
        settings = {
            "launcher": "slurm",
            "partition": "cpu",
            "python": str(self.python),
            "cpus": 1,
            "memory_mb": 200,
            "time_min": 10,
            **launch,
        }
        run = Run.create(
            self.folder / "run",
            {
                "sandbox": {"name": "bwrap", "image": "host"},
                "launch": settings,
                "lease": {"beat_s": 1, "silence_s": 60, "scheduler_poll_s": 1},
            },
        )
        run.submit([Task(task_id="t", handler="math", prompt="1+1?", spec={"answer": "2"})], key="k")
        self.handles += run.launch(workers=workers)
        return run

    def noted(self, what: str) -> list[str]:
        """The notes of kind `what` (`start`, `TERM`, `USR2`): one per rank and start."""
        return sorted(path.name for path in self.notes.glob(f"{what}.*"))

    def fields(self, handle: JobHandle) -> dict[str, str]:
        argv = ["scontrol", "show", "job", "--oneliner", handle.job_id]
        answer = subprocess.run(argv, capture_output=True, text=True, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", answer.stdout))

    def log(self) -> str:
        texts = [path.read_text() for path in sorted(self.folder.glob("run/logs/launches/*/*.out"))]
        return "\n".join(texts)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            states = [self.fields(handle).get("JobState") for handle in self.handles]
            assert time.monotonic() < end, f"no {what}; jobs {states}; log:\n{self.log()}"
            time.sleep(0.2)


STAND_IN = """#!/bin/bash
case "$*" in *hpcroll.worker*) ;; *) exec {python} "$@" ;; esac
id="${{SLURM_ARRAY_TASK_ID:-0}}.${{SLURM_RESTART_COUNT:-0}}"
trap 'touch {notes}/TERM.$id; sleep 1; exit 0' TERM
trap 'touch {notes}/USR2.$id; sleep 1; exit 0' USR2
echo "${{FROM_SETUP:-}} $SLURM_JOB_PARTITION $*" > {notes}/start.$id
while :; do sleep 0.1; done
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    if made.handles:
        ids = [handle.job_id for handle in made.handles]
        subprocess.run(["scancel", "--quiet", *ids], check=False)
        made.wait("end of the jobs", lambda: all(ended(made.fields(handle)) for handle in made.handles))


def ended(fields: dict[str, str]) -> bool:
    return fields.get("JobState") not in {"PENDING", "RUNNING", "COMPLETING", "SUSPENDED"}


def test_array_runs_one_rank_per_task_with_setup_lines_and_is_found_from_elsewhere(cluster: Cluster) -> None:
    run = cluster.launch(workers=3, setup=["export FROM_SETUP=yes"], sbatch={"comment": "hpcroll test"})
    cluster.wait("start of three ranks", lambda: len(cluster.noted("start")) == 3)
    note = (cluster.notes / "start.2.0").read_text()
    assert note.startswith("yes cpu -m hpcroll.worker ")
    assert note.endswith("--leg init+run+eval --rank 2\n")
    assert cluster.fields(cluster.handles[0])["Comment"] == "hpcroll"
    (launch,) = read_launches(run.path)
    assert launch.handles == tuple(cluster.handles)
    assert Run.open(run.path).job_states() == [JobState.RUNNING] * 3


def test_drain_ends_running_ranks_and_takes_waiting_ones_out_for_good(cluster: Cluster) -> None:
    run = cluster.launch(workers=3, array_parallelism=1)
    cluster.wait("start of one rank", lambda: len(cluster.noted("start")) == 1)
    run.drain()
    cluster.wait("end of every job", lambda: all(ended(cluster.fields(item)) for item in cluster.handles))
    assert cluster.noted("TERM") == ["TERM.0.0"]
    assert len(cluster.noted("start")) == 1
    cluster.wait("word of it", lambda: set(run.job_states()) == {JobState.DONE})


def test_time_limit_drains_and_requeues_while_work_is_left(cluster: Cluster) -> None:
    cluster.launch(time_min=1, signal_s=45)
    cluster.wait("warning of the time limit", lambda: cluster.noted("USR2") == ["USR2.0.0"])
    cluster.wait("second start", lambda: cluster.noted("start") == ["start.0.0", "start.0.1"])
    assert "drained with work left and was requeued" in cluster.log()


def test_restarts_have_an_end(cluster: Cluster) -> None:
    cluster.launch(time_min=1, signal_s=45, restarts=0)
    cluster.wait("warning of the time limit", lambda: cluster.noted("USR2") == ["USR2.0.0"])
    cluster.wait("end", lambda: cluster.fields(cluster.handles[0]).get("JobState") == "COMPLETED")
    assert "not requeued, the job was restarted 0 times already" in cluster.log()


def test_preempted_rank_that_drains_within_the_grace_time_comes_back(cluster: Cluster) -> None:
    cluster.launch(cpus=4, sbatch={"nodelist": "n1"})
    cluster.wait("start", lambda: cluster.noted("start") == ["start.0.0"])
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodelist=n1", "--cpus-per-task=4", "--time=1"]
    subprocess.run([*urgent, "--output=/dev/null", "--wrap=true"], check=True, capture_output=True)
    cluster.wait("word of preemption", lambda: cluster.noted("TERM") == ["TERM.0.0"])
    cluster.wait("second start", lambda: "start.0.1" in cluster.noted("start"))


def test_cancelled_job_does_not_come_back(cluster: Cluster) -> None:
    run = cluster.launch()
    cluster.wait("start", lambda: cluster.noted("start") == ["start.0.0"])
    subprocess.run(["scancel", cluster.handles[0].job_id], check=True)
    cluster.wait("end", lambda: cluster.fields(cluster.handles[0]).get("JobState") == "CANCELLED")
    cluster.wait("word of it", lambda: run.job_states() == [JobState.DONE])
    assert cluster.noted("start") == ["start.0.0"]


def test_requeue_by_an_operator_brings_the_rank_back_once(cluster: Cluster) -> None:
    cluster.launch()
    cluster.wait("start", lambda: cluster.noted("start") == ["start.0.0"])
    subprocess.run(["scontrol", "requeue", cluster.handles[0].job_id], check=True)
    cluster.wait("second start", lambda: cluster.noted("start") == ["start.0.0", "start.0.1"])
    assert cluster.fields(cluster.handles[0])["Restarts"] == "1"


def test_unknown_partition_is_refused_and_refusals_are_in_slurms_words(cluster: Cluster) -> None:
    with pytest.raises(SubmitError, match=r"no partition 'nowhere' .*; known: cpu, "):
        cluster.launch(partition="nowhere")
    with pytest.raises(SubmitError, match=r"(?i)memory|node configuration"):
        Cluster.launch(Cluster(make(cluster.folder / "other")), memory_mb=64_000_000)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
