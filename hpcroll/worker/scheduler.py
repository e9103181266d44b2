"""What Slurm says of another worker's job, asked seldom and for all of them at once."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable
from typing import TypeGuard

from hpcroll.spool import WorkerInfo

_COMMAND_TIMEOUT_S = 30.0
_LIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "CONFIGURING", "STAGE_OUT"}
_NUMERIC = re.compile(r"^\d+$")


class SlurmJobs:
    """Answers whether the job that a worker ran in has ended, from `squeue`, at most once a `poll_s`."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._asked_at = float("-inf")
        self._wanted: set[str] = set()
        self._known: dict[str, tuple[str, int]] | None = None
        """State and restart count by job id, of the jobs that were asked for; None: no answer yet."""
        self._answered: set[str] = set()

    def ask(self, workers: Iterable[WorkerInfo]) -> None:
        """Asks for all of `workers` at once, so that `ended` answers for each of them now."""
        self._wanted |= {worker.job_id for worker in workers if _is_job(worker.job_id)}
        if self._wanted:
            self._ask()

    def ended(self, worker: WorkerInfo) -> bool | None:
        """True where that incarnation's job is over; None where nobody can say (yet).

        A job that runs again under the same id has a higher restart count than its old incarnation.
        """
        job = worker.job_id
        if not _is_job(job):
            return None
        self._wanted.add(job)
        if time.monotonic() - self._asked_at >= self._poll_s:
            self._ask()
        if self._known is None or job not in self._answered:
            return None
        state, restarts = self._known.get(job, ("GONE", 0))
        return state not in _LIVE or restarts > worker.restart_count

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._answered, self._known = set(), None
        jobs, self._wanted = sorted(self._wanted), set()
        columns = "JobID:40,State:30,RestartCnt:20"
        argv = ["squeue", "--noheader", "--states=all", f"--Format={columns}", f"--jobs={','.join(jobs)}"]
        try:
            answer = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return
        # A single job that Slurm has forgotten is an error there, one of several is just left out.
        if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
            return
        rows = [line.split() for line in answer.stdout.splitlines()]
        self._known = {row[0]: (row[1], int(row[2])) for row in rows if len(row) == 3}
        self._answered = set(jobs)


def _is_job(job_id: str | None) -> TypeGuard[str]:
    return job_id is not None and _NUMERIC.match(job_id) is not None
