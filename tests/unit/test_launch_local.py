"""Local ranks: detached, found again from anywhere, stopped by identity."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcroll.config import LaunchConfig, RunConfig
from hpcroll.errors import ConfigError, LaunchError
from hpcroll.launch import JobState, Ranks, read_launches
from hpcroll.launch.identity import ProcessIdentity
from hpcroll.launch.local import LocalLauncher

LEG = "init+run+eval"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Stands for the workers' interpreter: idles until SIGTERM; `fail` in its rank's directory fails it."""
    script = tmp_path / "fake-python"
    script.write_text(
        "#!/bin/bash\n"
        "trap 'exit 0' TERM\n"
        f'echo "$@" > {tmp_path}/args.$7.tmp && mv {tmp_path}/args.$7.tmp {tmp_path}/args.$7\n'
        f"while [ ! -e {tmp_path}/fail.$7 ]; do sleep 0.05; done\n"
        "exit 3\n"
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def run_dir(tmp_path: Path, python: Path) -> Iterator[Path]:
    run_dir = tmp_path / "run with space"
    run_dir.mkdir()
    yield run_dir
    Ranks(run_dir, config(python)).stop()


def config(python: Path) -> RunConfig:
    setup = ("export FROM_SETUP=1",)
    return RunConfig(launch=LaunchConfig(launcher="local", python=str(python), setup=setup))


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


def test_ranks_outlive_their_launcher_and_are_found_and_stopped_by_another_process(
    run_dir: Path, python: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from hpcroll.launch.local import LocalLauncher;"
        "from hpcroll.config import RunConfig, LaunchConfig;"
        f"LocalLauncher(Path({str(run_dir)!r}), RunConfig(launch=LaunchConfig(python={str(python)!r})))"
        f".start(2, leg={LEG!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    ranks = Ranks(run_dir, config(python))
    wait_until(lambda: (tmp_path / "args.0").exists() and (tmp_path / "args.1").exists())
    assert (tmp_path / "args.1").read_text().endswith(f"--leg {LEG} --rank 1\n")
    assert [state for _, state in ranks.states()] == [JobState.RUNNING] * 2
    assert ranks.stop() == []
    wait_until(lambda: [state for _, state in ranks.states()] == [JobState.DONE] * 2)


def test_failed_rank_is_told_from_one_that_ended(run_dir: Path, python: Path, tmp_path: Path) -> None:
    launcher = LocalLauncher(run_dir, config(python))
    handles = launcher.start(2, leg=LEG)
    wait_until(lambda: (tmp_path / "args.1").exists())
    (tmp_path / "fail.1").touch()
    wait_until(lambda: list(launcher.states(handles)) == [JobState.RUNNING, JobState.FAILED])


def test_launch_leaves_no_zombie_in_a_caller_that_lives_on(run_dir: Path, python: Path) -> None:
    launcher = LocalLauncher(run_dir, config(python))
    handles = launcher.start(1, leg=LEG)
    launcher.stop(handles)
    wait_until(lambda: list(launcher.states(handles)) != [JobState.RUNNING])
    identity = ProcessIdentity.read(handles[0].log / "rank0.json")
    assert identity is not None
    wait_until(lambda: not Path(f"/proc/{identity.pid}").exists())


def test_killed_supervisor_leaves_the_ranks_alone(run_dir: Path, python: Path, tmp_path: Path) -> None:
    launcher = LocalLauncher(run_dir, config(python))
    handles = launcher.start(1, leg=LEG)
    supervisor = ProcessIdentity.read(handles[0].log / "supervisor.json")
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not supervisor.alive())
    assert list(launcher.states(handles)) == [JobState.RUNNING]
    launcher.stop(handles)
    wait_until(lambda: list(launcher.states(handles)) == [JobState.FAILED])


def test_reused_pid_is_not_taken_for_the_rank_and_not_signalled(tmp_path: Path) -> None:
    mine = ProcessIdentity.of(os.getpid())
    stranger = ProcessIdentity(mine.pid, mine.started_ticks + 1, mine.host, mine.boot_id)
    assert mine.alive()
    assert not stranger.alive()
    stranger.terminate()  # would end this test run if it went by the pid


def test_rank_of_another_node_is_unknown_and_not_stopped_from_here(run_dir: Path, python: Path) -> None:
    launcher = LocalLauncher(run_dir, config(python))
    handles = launcher.start(1, leg=LEG)
    path = handles[0].log / "rank0.json"
    original = path.read_text()
    elsewhere = json.dumps({**json.loads(original), "host": "elsewhere"})
    supervisor = ProcessIdentity.read(handles[0].log / "supervisor.json")
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: not supervisor.alive())
    path.write_text(elsewhere)
    assert list(launcher.states(handles)) == [JobState.UNKNOWN]
    with pytest.raises(LaunchError, match="runs on elsewhere"):
        launcher.stop(handles)
    (trouble,) = Ranks(run_dir, config(python)).stop()
    assert "runs on elsewhere" in trouble
    path.write_text(original)


def test_launches_are_recorded_with_who_when_and_what(run_dir: Path, python: Path) -> None:
    handles = LocalLauncher(run_dir, config(python)).start(2, leg=LEG)
    (launch,) = read_launches(run_dir)
    assert launch.handles == tuple(handles)
    assert (launch.record.launcher, launch.record.leg, launch.record.workers) == ("local", LEG, 2)


def test_unwritable_run_directory_is_refused_before_anything_starts(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        LocalLauncher(blocked, RunConfig()).start(1, leg=LEG)
