"""`launch --wait` with workers that die without a word: the run is sealed when the last one has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.contract import Task
from hpcroll.shards import open_run, verify_run

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 120.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"gave up waiting until {what}"
        time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nexport PYTHONPATH={CHECKOUT}\nexec {sys.executable} -m tests.faults.seal_worker "$@"\n'
    )
    python.chmod(0o755)
    config = {
        "sandbox": {"name": "bwrap", "image": "host"},
        "launch": {"launcher": "local", "python": str(python)},
        "lease": {"beat_s": 0.05, "silence_s": 30},
    }
    run = Run.create(tmp_path / "run", config)
    tasks = [Task(task_id=name, handler="math", prompt="1+1?", spec={"answer": "2"}) for name in "ab"]
    run.submit(tasks, samples=2, key="k")
    yield run
    (run.path / "release").touch()
    run.wait()


def start(run: Run, workers: int) -> subprocess.Popen[str]:
    # Whoever starts the tests in the background may have SIGINT ignored, which is inherited.
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "hpcroll.cli"]
    argv += ["launch", str(run.path), "-n", str(workers), "--wait"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=CHECKOUT)


def test_waiting_launch_seals_what_a_worker_left_that_died_without_a_word(run: Run) -> None:
    process = start(run, 1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, "a worker failed"
    assert "recorded the end of" in err
    assert "its process is gone" in err
    assert "1 records indexed" in err
    assert "its worker is dead; another one has to take it over" in err
    assert "2 of 4 rollouts have their result" in err
    assert LEG in out
    assert len(list(open_run(run.path, trust_marks=True))) == 2
    assert verify_run(run.path).unmarked == 0


LEG = "init+run+eval"


def test_interrupted_wait_leaves_the_workers_alone_and_sealing_later_is_as_good(run: Run) -> None:
    process = start(run, 2)
    alive = run.path / "logs" / "alive"
    told: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: told.extend(process.stdout or ()))
    reader.start()
    wait_until(lambda: alive.exists() and any(LEG in line for line in told), "both workers are launched")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_S) != 0
    reader.join()
    assert process.stderr is not None
    err = process.stderr.read()
    for stream in (process.stdout, process.stderr):
        stream.close()
    assert f"`hpcroll shards seal {run.path}` does what --wait would" in err
    wait_until(lambda: len(run.seal().alive) == 1, "the worker that lives is seen to live")
    report = run.seal()
    assert report.alive == (alive.read_text(),)
    assert not (run.path / "workers" / f"{alive.read_text()}.ended").exists()
    (run.path / "release").touch()
    final = run.wait()
    assert final.alive == ()
    assert verify_run(run.path).unmarked == 0
