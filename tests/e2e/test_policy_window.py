"""Real workers and a trainer's window: whatever dies, no group is started that the trainer does not allow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import RolloutRef, Status, Task
from hpcroll.fs import RunPaths
from hpcroll.launch import JobState
from hpcroll.shards import verify_run
from hpcroll.spool import Event, read_events, read_worker
from hpcroll.testing.policy_server import Script, solves
from tests.capabilities import need

WAIT_S = 240.0
GROUPS, SAMPLES = 12, 2
SPEC = {"verify": ["sh", "-c", "cp answer.txt reward.txt || echo 0 > reward.txt"]}


@pytest.fixture(autouse=True)
def _bwrap() -> None:
    need("bwrap")


def tasks() -> list[Task]:
    return [
        Task(
            task_id=f"t{n}", handler="command", prompt=f"Write 1 into answer.txt. Number {n:03d}.", spec=SPEC
        )
        for n in range(GROUPS)
    ]


class Scene:
    """A run with more room than its window, and what is to be seen of it on disk."""

    def __init__(self, root: Path, url: str, **launch: Any) -> None:
        config = {
            "model": {"endpoints": [url]},
            "sandbox": {"name": "bwrap", "image": "host"},
            "stages": {
                "init": {"width": 8, "timeout_s": 120},
                "run": {"width": 8, "timeout_s": 120},
            },
            "lease": {"beat_s": 0.5, "silence_s": 60},
            "launch": {"launcher": "local", "idle_s": 1, **launch},
        }
        self.run = Run.create(root, config=config)
        self.paths = RunPaths(self.run.path)
        self.segment = self.run.submit(tasks(), samples=SAMPLES, key="k").segment

    def started(self) -> set[int]:
        """Groups of which some rollout was ever claimed."""
        leg = self.run.config.leg_names[0]
        directory = self.paths.claim_directory(leg, RolloutRef(segment=self.segment.name, ordinal=0))
        names = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
        return {int(name.partition(".")[0]) // SAMPLES for name in names}

    def committed(self) -> int:
        return sum(1 for _ in self.run.results("k", wait=False))

    def events(self, name: str) -> list[Event]:
        return [event for event in read_events(self.paths) if event.event == name]

    def idle_workers(self) -> set[str]:
        """Workers that live and said last that they wait for the window."""
        last = {event.incarnation: event.event for event in read_events(self.paths)}
        return {worker for worker, event in last.items() if event == "window.wait" and self.pid(worker)}

    def pid(self, worker: str) -> int | None:
        info = read_worker(self.paths.worker_file(worker))
        return info.pid if info is not None and Path(f"/proc/{info.pid}").exists() else None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            events = [f"{event.incarnation} {event.event}" for event in read_events(self.paths)][-20:]
            assert time.monotonic() < deadline, f"gave up waiting until {what}: {self.started()}, {events}"
            time.sleep(0.1)

    def workers_live(self) -> bool:
        return any(state in (JobState.PENDING, JobState.RUNNING) for state in self.run.job_states())

    def assert_all_ended_well(self) -> None:
        self.wait_until(lambda: self.committed() == GROUPS * SAMPLES, "all is committed")
        results = list(self.run.results("k", wait=False))
        assert len({result.rollout_id for result in results}) == len(results)
        assert {result.status for result in results} == {Status.COMPLETED}
        report = verify_run(self.run.path)
        assert report.ok, report


@pytest.fixture
def scene(tmp_path: Path, serve_scripts: Callable[..., str]) -> Callable[..., Scene]:
    scripts = [
        Script(prompt=task.prompt, behaviours=(solves(["echo 1 > answer.txt"], "done"),)) for task in tasks()
    ]
    url = serve_scripts(scripts)
    return lambda **launch: Scene(tmp_path / "run", url, **launch)


def test_rollouts_never_pass_the_window_though_there_is_room(scene: Callable[..., Scene]) -> None:
    scene_ = scene()
    run = scene_.run
    run.policy.publish(0, weights="ckpt/0")
    run.policy.window(groups=3)
    run.launch(workers=2)
    scene_.wait_until(lambda: scene_.committed() == 3 * SAMPLES, "three groups are committed")
    scene_.wait_until(lambda: len(scene_.idle_workers()) == 2, "both workers wait for the window")
    assert scene_.started() == {0, 1, 2}

    run.policy.settle(2)
    scene_.wait_until(lambda: scene_.committed() == 5 * SAMPLES, "two further groups are committed")
    assert scene_.started() == {0, 1, 2, 3, 4}

    # One worker dies; its parent starts another, which has to keep to the window as well.
    scene_.wait_until(lambda: len(scene_.idle_workers()) == 2, "both workers wait again")
    before = scene_.idle_workers()
    victim = scene_.pid(sorted(before)[0])
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    run.launch(workers=1)
    scene_.wait_until(lambda: bool(scene_.idle_workers() - before), "a new worker waits")
    # The trainer starts again from an older checkpoint and says again what it has said.
    restarted = Run.open(run.path).policy
    restarted.window(groups=3)
    for settled in (1, 2):
        assert restarted.settle(settled).limit == 5
    assert scene_.started() == {0, 1, 2, 3, 4}

    for settled in range(3, GROUPS + 1):
        restarted.settle(settled)
        expected = min(GROUPS, settled + 3)
        scene_.wait_until(lambda e=expected: len(scene_.started()) == e, f"{expected} groups are started")
        assert max(scene_.started()) < expected
    scene_.assert_all_ended_well()
    scene_.wait_until(lambda: not scene_.workers_live(), "the workers end")


TRAINER = """
import sys
from hpcroll.api import Run

run, step, stop_at = Run.open(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def reach(point):
    print(point, flush=True)
    if point == stop_at:
        sys.stdin.read()

run.policy.window(versions=0, groups_per_version=2)
run.policy.publish(step - 1, weights=f"ckpt/{step - 1}")
reach("began")
run.policy.settle(2 * step)
reach("settled")
run.policy.publish(step, weights=f"ckpt/{step}")
reach("published")
"""


def test_trainer_killed_between_settle_and_publish_loses_nothing_and_lets_nothing_through(
    scene: Callable[..., Scene],
) -> None:
    scene_ = scene()
    trainer_step(scene_, 1, kill_at="began")
    scene_.run.launch(workers=2)
    scene_.wait_until(lambda: scene_.committed() == 2 * SAMPLES, "two groups are committed")
    for step in range(1, GROUPS // 2):
        trainer_step(scene_, step, kill_at="settled")
        scene_.wait_until(lambda: len(scene_.idle_workers()) == 2, "both workers wait for the version")
        assert scene_.started() == set(range(2 * step)), "settled, but the version is not there"
        trainer_step(scene_, step, kill_at="published")
        trainer_step(scene_, step)
        allowed = 2 * step + 2
        scene_.wait_until(lambda n=allowed: scene_.committed() == n * SAMPLES, "the next ones are committed")
        assert scene_.started() == set(range(allowed))
    scene_.assert_all_ended_well()


def trainer_step(scene: Scene, step: int, *, kill_at: str = "") -> None:
    """A trainer as a process of its own, killed where it says that it is at `kill_at`."""
    argv = [sys.executable, "-c", TRAINER, str(scene.run.path), str(step), kill_at]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if line.strip() == kill_at:
                trainer.kill()
        assert trainer.wait(WAIT_S) == (-signal.SIGKILL if kill_at else 0)


def test_worker_that_waits_in_vain_ends_and_its_successor_goes_on(scene: Callable[..., Scene]) -> None:
    scene_ = scene(window_wait_s=2)
    scene_.run.policy.window(groups=2)
    scene_.run.launch(workers=1)
    scene_.wait_until(lambda: not scene_.workers_live(), "the worker gives up")
    assert scene_.committed() == 2 * SAMPLES
    (end,) = scene_.events("worker.end")
    assert end.fields["reason"] == "the window let nothing start for 2 s"
    scene_.run.policy.settle(2)
    scene_.run.policy.lift_window()
    scene_.run.launch(workers=1)
    scene_.assert_all_ended_well()
