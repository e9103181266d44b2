"""Workers as processes on this node; they outlive the process that launched them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcroll.config import RunConfig
from hpcroll.errors import LaunchError, SubmitError
from hpcroll.launch.base import JobHandle, JobState
from hpcroll.launch.identity import ProcessIdentity
from hpcroll.launch.record import begin_launch
from hpcroll.launch.sbatch import worker_python
from hpcroll.launch.supervisor import exit_file, rank_file, supervisor_file

_START_TIMEOUT_S = 60.0
"""Longest that a loaded machine may take to start the ranks' processes."""


class LocalLauncher:
    """Starts ranks as detached processes; their pid, start time and boot id tell their state."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir = run_dir.absolute()
        self._config = config

    def start(self, workers: int, *, leg: str) -> Sequence[JobHandle]:
        """Starts `workers` ranks for `leg`, each in its own session; raises `SubmitError`."""
        launch = begin_launch(self._run_dir, launcher="local", leg=leg, workers=workers)
        directory = launch.directory
        script = directory / "rank.sh"
        script.write_text(self.preview(workers, leg=leg))
        _leave_supervisor(directory, script, workers)
        return launch.add(f"{launch.record.launch_id}/{rank}" for rank in range(workers)).handles

    def preview(self, workers: int, *, leg: str) -> str:
        """The shell script that each rank runs, its number as the argument."""
        command = f"exec {worker_python(self._config.launch)} -m hpcroll.worker"
        arguments = f'{shlex.quote(str(self._run_dir))} --leg {shlex.quote(leg)} --rank "$1"'
        title = f"# {workers} workers for leg {leg} on this node"
        return "\n".join(["#!/bin/bash", title, *self._config.launch.setup, f"{command} {arguments}", ""])

    def states(self, handles: Sequence[JobHandle]) -> Sequence[JobState]:
        """The state of each rank; `UNKNOWN` for ranks of another node."""
        return [_state(handle) for handle in handles]

    def stop(self, handles: Sequence[JobHandle]) -> None:
        """Sends SIGTERM to each rank that still runs; raises `LaunchError` for ranks of another node."""
        for handle in handles:
            identity = _identity(handle)
            if identity is None or exit_file(handle.log, _rank(handle)).exists():
                continue
            if not identity.here():
                raise LaunchError(
                    f"rank {handle.job_id} runs on {identity.host}; stop it there, or drain the run"
                )
            identity.terminate()


def _leave_supervisor(directory: Path, script: Path, workers: int) -> None:
    argv = [sys.executable, "-m", "hpcroll.launch.supervisor", str(directory), str(script)]
    log = directory / "supervisor.log"
    with log.open("ab") as output:
        try:
            status = subprocess.run(
                [*argv, "--ranks", str(workers)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_START_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 1
    if status != 0:
        raise SubmitError(f"the local ranks did not start; see {log}")


def _state(handle: JobHandle) -> JobState:
    identity, supervisor = _identity(handle), ProcessIdentity.read(supervisor_file(handle.log))
    # A rank that is dead while its supervisor lives is about to have its end recorded. In this order:
    # whoever is seen dead has written what it had to write.
    running = any(process and process.here() and process.alive() for process in (supervisor, identity))
    ended = exit_file(handle.log, _rank(handle))
    if ended.exists():
        return JobState.DONE if ended.read_text().strip() == "0" else JobState.FAILED
    if running:
        return JobState.RUNNING
    # Dead without a recorded end: its supervisor was killed, or the node went down.
    return JobState.FAILED if identity is not None and identity.here() else JobState.UNKNOWN


def _identity(handle: JobHandle) -> ProcessIdentity | None:
    return ProcessIdentity.read(rank_file(handle.log, _rank(handle)))


def _rank(handle: JobHandle) -> int:
    return int(handle.job_id.rpartition("/")[2])
