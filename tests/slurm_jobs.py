"""The jobs of a test on the cluster: which of them live, and the end of all of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

_PATIENCE_S = 300.0


def live_jobs(job_ids: Sequence[str]) -> list[str]:
    """Id and state of those of `job_ids` that wait or run."""
    argv = ["squeue", "--noheader", "--format=%i %T", f"--jobs={','.join(job_ids)}"]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False)
    return answer.stdout.splitlines()


def end_jobs(job_ids: Sequence[str]) -> None:
    """Cancels the jobs and waits until none of them lives."""
    if not job_ids:
        return
    subprocess.run(["scancel", "--quiet", *job_ids], check=False)
    deadline = time.monotonic() + _PATIENCE_S
    while live := live_jobs(job_ids):
        assert time.monotonic() < deadline, f"jobs do not end: {live}"
        time.sleep(0.2)
