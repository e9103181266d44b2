"""What was launched, kept in the run directory so that anyone can find the ranks again."""

from __future__ import annotations

import getpass
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ValidationError

from hpcroll.contract import Frozen, Record
from hpcroll.errors import ConfigError, LaunchError
from hpcroll.fs import RunPaths, make_directories, replace
from hpcroll.launch.base import JobHandle

_RECORD = "launch.json"


class JobEntry(Frozen):
    """One job of a launch: the launcher's name for it."""

    job_id: str


class LaunchRecord(Record):
    """One launch. Written before anything is started and again with each batch of jobs."""

    SCHEMA: ClassVar[str] = "1.0"

    launch_id: str
    launcher: str
    leg: str
    workers: int
    host: str
    user: str
    started_at: float
    """Unix seconds on the launching host; for people."""
    jobs: tuple[JobEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch's record and its directory, where everything about it is found."""

    record: LaunchRecord
    directory: Path

    @property
    def handles(self) -> tuple[JobHandle, ...]:
        """The started jobs, as their launcher takes them."""
        return tuple(JobHandle(job.job_id, self.record.leg, self.directory) for job in self.record.jobs)

    def add(self, job_ids: Iterable[str]) -> Launch:
        """The launch with further started jobs, durably recorded on return."""
        jobs = (*self.record.jobs, *(JobEntry(job_id=job_id) for job_id in job_ids))
        launch = Launch(self.record.model_copy(update={"jobs": jobs}), self.directory)
        launch.write()
        return launch

    def write(self) -> None:
        """Replaces the record on disk; readers see the old one or the new one."""
        replace(self.directory / _RECORD, self.record.to_json().encode() + b"\n")


def begin_launch(run_dir: Path, *, launcher: str, leg: str, workers: int) -> Launch:
    """A new launch with nothing started yet, recorded with its directory.

    The directory exists before any job does: Slurm drops the output of jobs whose log folder is missing.
    Raises `ConfigError` where the run directory cannot be written.
    """
    launch_id = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
    directory = RunPaths(run_dir).launches / launch_id
    record = LaunchRecord(
        launch_id=launch_id,
        launcher=launcher,
        leg=leg,
        workers=workers,
        host=socket.gethostname(),
        user=getpass.getuser(),
        started_at=time.time(),
    )
    launch = Launch(record, directory)
    try:
        make_directories([directory])
        launch.write()
    except OSError as error:
        raise ConfigError(
            f"run {run_dir} cannot be written ({error.strerror}): {directory}; nothing was launched"
        ) from error
    return launch


def read_launches(run_dir: Path) -> Sequence[Launch]:
    """Every launch of the run, oldest first; raises `LaunchError` for a record that is no record."""
    launches = []
    for path in sorted(RunPaths(run_dir).launches.glob(f"*/{_RECORD}")):
        try:
            record = LaunchRecord.from_json(path.read_bytes())
        except (ValidationError, OSError) as error:
            raise LaunchError(f"launch record {path} cannot be read: {error}") from error
        launches.append(Launch(record, path.parent))
    return launches
