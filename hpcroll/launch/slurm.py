"""Workers as Slurm jobs, submitted through submitit: arrays, one worker per array task."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcroll.config import RunConfig
from hpcroll.errors import LaunchError, SubmitError
from hpcroll.launch.base import JobHandle, JobState
from hpcroll.launch.command import CommandOutput, RunCommand, run_command
from hpcroll.launch.rank import Rank
from hpcroll.launch.record import Launch, begin_launch
from hpcroll.launch.sbatch import ranks_per_job, submitit_parameters, worker_python
from hpcroll.launch.scheduler import SlurmFacts, SlurmView, slurm_facts

_CANCEL_BATCH = 500
"""Job ids per scancel: argument lists are finite."""
_ENDED_WORDS = ("Invalid job id", "already completing or completed")


class SlurmLauncher:
    """Starts workers through submitit and asks the controller for their states."""

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        run: RunCommand = run_command,
        view: SlurmView | None = None,
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._config = config
        self._run = run
        self._view = view or SlurmView(poll_s=config.lease.scheduler_poll_s, run=run)

    def start(self, workers: int, *, leg: str) -> Sequence[JobHandle]:
        """Submits at least `workers` ranks for `leg`, as arrays of at most MaxArraySize jobs.

        Raises `SubmitError` with the scheduler's own words. Jobs that were submitted before the refusal
        are recorded and stay.
        """
        facts = slurm_facts(self._run)
        parameters = self._parameters(leg)
        self._check_partition(leg, facts)
        launch = begin_launch(self._run_dir, launcher="slurm", leg=leg, workers=workers)
        for batch in self._batches(workers, leg, facts.max_array_size):
            launch = launch.add(self._submit(batch, parameters, launch))
        return launch.handles

    def preview(self, workers: int, *, leg: str) -> str:
        """The sbatch script of the first array, with how many there are."""
        from submitit.slurm.slurm import _make_sbatch_string

        try:
            size = slurm_facts(self._run).max_array_size
        except LaunchError:
            size = 1001  # Slurm's default: a script can be shown where there is no Slurm
        batches = list(self._batches(workers, leg, size))
        folder = self._run_dir / "logs" / "launches" / "LAUNCH"
        command = f"{worker_python(self._config.launch)} -u -m submitit.core._submit {folder}"
        count = len(batches[0])
        script = _make_sbatch_string(
            command=command, folder=folder, map_count=count if count > 1 else None, **self._parameters(leg)
        )
        jobs = sum(len(batch) for batch in batches)
        return f"# {workers} workers for leg {leg}: {jobs} jobs in {len(batches)} submissions\n{script}"

    def states(self, handles: Sequence[JobHandle]) -> Sequence[JobState]:
        """The state of each job; see `SlurmView` for how old it may be."""
        states = self._view.states(handle.job_id for handle in handles)
        return [states[handle.job_id] for handle in handles]

    @property
    def trouble(self) -> str | None:
        """Why the last query for states failed, None where it did not."""
        return self._view.trouble

    def stop(self, handles: Sequence[JobHandle]) -> None:
        """Takes waiting jobs out of the queue and has running ones drain; raises `LaunchError`.

        Running jobs are signalled, not cancelled: a cancelled job has only `KillWait` seconds to release
        its rollouts.
        """
        job_ids = [handle.job_id for handle in handles]
        for start in range(0, len(job_ids), _CANCEL_BATCH):
            batch = job_ids[start : start + _CANCEL_BATCH]
            for how in ("--state=PENDING", "--signal=TERM"):
                answer = self._run(["scancel", how, *batch])
                if answer.exit_code != 0 and not _only_ended(answer):
                    raise LaunchError(f"scancel {how} failed: {answer.words}")

    def _parameters(self, leg: str) -> dict[str, Any]:
        return submitit_parameters(
            self._config.launch, leg=leg, job_name=f"hpcroll-{self._run_dir.name}-{leg}"
        )

    def _check_partition(self, leg: str, facts: SlurmFacts) -> None:
        for name in (self._parameters(leg)["partition"] or "").split(","):
            if name and name not in facts.partitions:
                raise SubmitError(
                    f"Slurm has no partition {name!r} (leg {leg}); known: {', '.join(facts.partitions)}"
                )

    def _batches(self, workers: int, leg: str, size: int) -> Iterator[list[Rank]]:
        per_job = ranks_per_job(self._config.launch)
        jobs = -(-workers // per_job)
        python = worker_python(self._config.launch)
        ranks = [
            Rank(str(self._run_dir), leg, number, python, self._config.launch.restarts)
            for number in range(jobs)
        ]
        for start in range(0, jobs, size):
            yield ranks[start : start + size]

    def _submit(self, ranks: list[Rank], parameters: dict[str, Any], launch: Launch) -> list[str]:
        import submitit

        try:
            with _clean_environment():
                executor = submitit.SlurmExecutor(
                    folder=launch.directory, python=worker_python(self._config.launch)
                )
                executor.update_parameters(**parameters)
                jobs = executor.submit_array(ranks)
        # submitit raises bare RuntimeErrors, with sbatch's words in the last of several lines.
        except (RuntimeError, ValueError, OSError) as error:
            words = " ".join(str(error).split())[-500:]
            raise SubmitError(f"launch {launch.record.launch_id} was refused: {words}") from error
        return [str(job.job_id) for job in jobs]


def _only_ended(answer: CommandOutput) -> bool:
    """Whether scancel complained of nothing but jobs that have ended already."""
    lines = answer.stderr.splitlines()
    return bool(lines) and all(any(word in line for word in _ENDED_WORDS) for line in lines)


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Hides the variables of an allocation that this process may run in.

    sbatch passes its environment on: a worker would inherit the outer job's CPU pinning, memory and
    task counts.
    """
    hidden = {
        name: os.environ.pop(name)
        for name in tuple(os.environ)
        if name.startswith(("SLURM_", "SUBMITIT_", "SBATCH_GET_USER_ENV")) and name != "SLURM_CONF"
    }
    try:
        yield
    finally:
        os.environ.update(hidden)
