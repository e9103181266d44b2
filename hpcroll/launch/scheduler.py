"""What Slurm says: the states of our jobs, its partitions and its limits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpcroll.errors import LaunchError
from hpcroll.launch.base import JobState
from hpcroll.launch.command import RunCommand, run_command

POLL_S = 60.0
"""Least seconds between two queries: schedulers are shared, and admins count."""
_BACKOFF_CAP_S = 900.0

_RUNNING = frozenset(["RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"])
_PENDING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"]
)
_DONE = frozenset(["COMPLETED", "CANCELLED", "REVOKED"])


class SlurmView:
    """The states of jobs, by one query for all of them at most every `poll_s` seconds.

    Between queries the last answer stands. A query that fails doubles the wait, up to 15 minutes.
    """

    def __init__(
        self,
        *,
        poll_s: float = POLL_S,
        run: RunCommand = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll_s = poll_s
        self._run = run
        self._clock = clock
        self._wait_s = poll_s
        self._next = float("-inf")
        self._known: dict[str, JobState] = {}
        self._missing: dict[str, int] = {}
        self.trouble: str | None = None
        """Why the last query failed; None where it succeeded."""

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """The last known state of each of `job_ids` (`123` or, in an array, `123_4`).

        A job that two queries in turn did not find, although they succeeded, is `FAILED`: Slurm has
        forgotten it, and without accounting nobody will ever say more.
        """
        wanted = list(dict.fromkeys(job_ids))
        open_ids = [job for job in wanted if self._known.get(job) not in (JobState.DONE, JobState.FAILED)]
        if open_ids and self._clock() >= self._next:
            self._query(open_ids)
        return {job: self._known.get(job, JobState.UNKNOWN) for job in wanted}

    def _query(self, job_ids: list[str]) -> None:
        try:
            found = query_states(job_ids, self._run)
        except LaunchError as error:
            self.trouble = str(error)
            self._wait_s = min(2 * self._wait_s, _BACKOFF_CAP_S)
        else:
            self.trouble, self._wait_s = None, self._poll_s
            for job in job_ids:
                self._note(job, found.get(job))
        self._next = self._clock() + self._wait_s

    def _note(self, job: str, state: JobState | None) -> None:
        if state is not None:
            self._known[job] = state
            self._missing.pop(job, None)
            return
        self._missing[job] = self._missing.get(job, 0) + 1
        self._known[job] = JobState.UNKNOWN if self._missing[job] < 2 else JobState.FAILED


def query_states(job_ids: Iterable[str], run: RunCommand = run_command) -> dict[str, JobState]:
    """The states of those of `job_ids` that Slurm knows: the controller first, then accounting.

    Raises `LaunchError` where the controller does not answer. Absent accounting is no error.
    """
    wanted = set(job_ids)
    bases = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    queue = run(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T", f"--jobs={bases}"])
    if queue.exit_code != 0 and "Invalid job id" not in queue.stderr:
        raise LaunchError(f"squeue failed: {queue.words}")
    found = _parse(queue.stdout, wanted)
    if wanted - found.keys():
        accounting = run(
            ["sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State", f"--jobs={bases}"]
        )
        found = _parse(accounting.stdout, wanted) | found
    return found


def _parse(text: str, wanted: set[str]) -> dict[str, JobState]:
    listed: dict[str, JobState] = {}
    for line in text.splitlines():
        job, _, word = line.strip().partition("|")
        listed.update(dict.fromkeys(_expand(job), job_state(word)))
    # Accounting lists array tasks that were cancelled before they started under the array's bare number.
    return {
        name: listed[found]
        for name in wanted
        for found in (name if name in listed else name.partition("_")[0],)
        if found in listed
    }


def _expand(job: str) -> Iterable[str]:
    """`7_[0-2,5%4]` as accounting shows array tasks that never started, one by one."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    if match is None:
        yield job
        return
    for part in match[2].split(","):
        low, _, high = part.partition("-")
        for index in range(int(low), int(high or low) + 1):
            yield f"{match[1]}_{index}"


def job_state(word: str) -> JobState:
    """Our state for Slurm's, for example `CANCELLED by 1001`; a job ended on request is done."""
    name = word.split()[0].rstrip("+") if word.split() else ""
    if name in _RUNNING:
        return JobState.RUNNING
    if name in _PENDING:
        return JobState.PENDING
    if name in _DONE:
        return JobState.DONE
    return JobState.FAILED if name else JobState.UNKNOWN


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """What this cluster allows, as `scontrol show config` and `sinfo` tell it."""

    version: str
    max_array_size: int
    accounting: bool
    kill_wait_s: int
    requeue: bool
    """`JobRequeue`: jobs may be requeued by default; ours ask for it anyway."""
    preempt_mode: str
    partitions: tuple[str, ...]


def slurm_facts(run: RunCommand = run_command) -> SlurmFacts:
    """The facts of the cluster that this host submits to; raises `LaunchError`."""
    config = run(["scontrol", "show", "config"])
    if config.exit_code != 0:
        raise LaunchError(f"no Slurm controller answers: {config.words}")
    fields = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", config.stdout, re.MULTILINE))
    return SlurmFacts(
        version=fields.get("SLURM_VERSION", ""),
        max_array_size=_first_number(fields.get("MaxArraySize"), default=1001),
        accounting="slurmdbd" in fields.get("AccountingStorageType", ""),
        kill_wait_s=_first_number(fields.get("KillWait"), default=30),
        requeue=fields.get("JobRequeue") == "1",
        preempt_mode=fields.get("PreemptMode", ""),
        partitions=partitions(run),
    )


def partitions(run: RunCommand = run_command) -> tuple[str, ...]:
    """The partitions' names, the default one first; raises `LaunchError`."""
    answer = run(["sinfo", "--noheader", "--format=%P"])
    if answer.exit_code != 0:
        raise LaunchError(f"sinfo failed: {answer.words}")
    names = dict.fromkeys(answer.stdout.split())
    return tuple(name.rstrip("*") for name in sorted(names, key=lambda name: not name.endswith("*")))


def _first_number(text: str | None, *, default: int) -> int:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else default
