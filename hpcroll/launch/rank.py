"""What submitit runs in a Slurm job: one rank, and the requeue when work is left.

The rank is a subprocess, not a call, because submitit's process owns signal handlers, a stdin and a
pickle that a worker's event loop must not inherit. Slurm sends SIGUSR2 (`--signal`) and SIGTERM to every
process of the step, this one included; each is forwarded all the same, since a site may deliver it to
this process alone, and the rank takes a second one for the same wish.

Who brings a stopped rank back:
- time limit: SIGUSR2 comes `launch.signal_s` before it; the rank drains, and this process requeues its job.
- preemption: SIGTERM, then SIGKILL after the partition's grace time. Slurm requeues a job that it has to
  kill, but a job that drains and exits within the grace time counts as COMPLETED (seen with 22.05), so
  that this process requeues it.
- `scontrol requeue`, a failed node: Slurm does it.
- `scancel`, `hpcroll` stopping ranks, `hpcroll drain`: nobody, as asked.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hpcroll.errors import LaunchError
from hpcroll.launch.command import RunCommand, run_command
from hpcroll.spool import Spool

_STOPS = (signal.SIGTERM, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Rank:
    """A picklable rank of run `run_dir`; calling it runs it to its end.

    `python` is a shell-quoted command, as `launch.python` is. `restarts` is how often a job may have
    been restarted, for whatever reason, and still be requeued by this process.
    """

    run_dir: str
    leg: str
    rank: int
    python: str
    restarts: int

    def __call__(self) -> int:
        """Runs the rank; 0 where nothing is left to do or a stop was asked for.

        Raises `LaunchError` where the rank failed, so that the job is marked as failed, and `SystemExit`
        after a requeue.
        """
        child = _Forwarder()
        status = child.run(self._argv())
        if status not in (0, *(-number for number in child.stops)):
            raise LaunchError(
                f"rank {self._number()} of {self.run_dir} ended with status {status}; see above"
            )
        if child.stops and self._comes_back(child.stops):
            _requeue(os.environ["SLURM_JOB_ID"])
            # Not a return: submitit would record a result of a job that has not ended.
            raise SystemExit(0)
        return 0

    def checkpoint(self) -> Any:
        """What submitit requeues when its signal comes before the rank has started."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self))

    def _argv(self) -> list[str]:
        command = [*shlex.split(self.python), "-m", "hpcroll.worker", self.run_dir]
        return [*command, "--leg", self.leg, "--rank", str(self._number())]

    def _number(self) -> int:
        # A site may want several ranks in one job (`sbatch: {ntasks-per-node: 4}`).
        ranks = int(os.environ.get("SLURM_NTASKS", "1"))
        return self.rank * ranks + int(os.environ.get("SLURM_PROCID", "0"))

    def _comes_back(self, stops: AbstractSet[int]) -> bool:
        if int(os.environ.get("SLURM_PROCID", "0")) != 0:
            return False  # one requeue brings back every rank of the job
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= self.restarts:
            print(f"rank: not requeued, the job was restarted {self.restarts} times already", flush=True)
            return False
        return wants_requeue(os.environ["SLURM_JOB_ID"], stops) and work_left(Path(self.run_dir), self.leg)


def wants_requeue(job_id: str, stops: AbstractSet[int], run: RunCommand = run_command) -> bool:
    """Whether the job, told to stop by signals `stops`, has to be requeued by its own rank."""
    answer = run(["scontrol", "show", "job", "--oneliner", job_id])
    if answer.exit_code != 0:
        raise LaunchError(f"scontrol does not know job {job_id}: {answer.words}; it is not requeued")
    fields = dict(re.findall(r"(\w+)=(\S*)", answer.stdout))
    if fields.get("JobState") == "TIMEOUT":
        return True
    if fields.get("JobState") != "RUNNING":
        return False  # cancelled, or on its way back to the queue already
    preempted = fields.get("PreemptTime", "None") != "None"
    return preempted or signal.SIGUSR2 in stops


def work_left(run_dir: Path, leg: str) -> bool:
    """Whether a worker of `leg` would find something to do, now or later, were it started again."""
    spool = Spool.open(run_dir)
    if spool.wishes.closed or spool.wishes.draining(""):
        return False
    counts = spool.exact_counts()
    return counts.done[leg] < counts.total


def _requeue(job_id: str) -> None:
    answer = run_command(["scontrol", "requeue", job_id])
    # A requeue ends every process of the job, and so may end scontrol before it has said that it worked.
    if answer.exit_code not in (0, -signal.SIGTERM, -signal.SIGKILL):
        raise LaunchError(f"job {job_id} drained with work left and cannot be requeued: {answer.words}")
    print(f"rank: job {job_id} drained with work left and was requeued", flush=True)


class _Forwarder:
    """One child, and the stop signals that came for it."""

    def __init__(self) -> None:
        self.stops: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, argv: list[str]) -> int:
        """Runs `argv` to its end; its exit status, negative for a signal."""
        # submitit has set handlers that ignore SIGTERM and requeue at once on SIGUSR2.
        for number in _STOPS:
            signal.signal(number, self._forward)
        self._child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        for early in tuple(self.stops):  # came before there was a child to forward them to
            self._child.send_signal(early)
        return self._child.wait()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stops.add(number)
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)
