"""A run: created or opened, submitted to, launched, watched, ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpcroll.api.configuring import read_config
from hpcroll.api.results import Result, iterate_results
from hpcroll.api.retry import submit_retries
from hpcroll.api.sealing import SealReport, seal
from hpcroll.api.serving import serve
from hpcroll.api.validation import (
    check_agent,
    check_config,
    check_images,
    check_model,
    warn_of_missing_capabilities,
)
from hpcroll.config import RunConfig
from hpcroll.contract import RolloutRef, Task, Trajectory
from hpcroll.errors import ConfigError, CorruptRecordError, SpoolError
from hpcroll.launch import JobHandle, JobState, Ranks, preview_workers, start_workers
from hpcroll.policy import Endpoint, PolicyRegistry
from hpcroll.report import RunStatus, StatusObserver
from hpcroll.shards import open_run
from hpcroll.spool import Segment, Spool, Submission, segment_name

if TYPE_CHECKING:
    from hpcroll.api.replenish import Pool

log = logging.getLogger(__name__)

_LIVE = (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)
_WAIT_POLL_S = 0.5
_ENDPOINT_SILENCE_S = 60.0


class Run:
    """One run directory on the shared file system, the same from every process and node.

    Everything lives in the directory: a `Run` may be opened anywhere, any number of times, and dropped
    at any moment. Methods raise `HpcrollError`s that say what to do.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._ranks = Ranks(spool.paths.root, spool.config)
        self._observer = StatusObserver(spool)
        self.policy = PolicyRegistry(spool.paths, name=spool.config.model.name)
        """Policy versions and pauses: `run.policy.publish(7, weights="ckpt/7")`, `run.policy.paused()`."""

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: Path | str | RunConfig | dict[str, Any] | None = None,
        *,
        overrides: Iterable[str] = (),
    ) -> Self:
        """The run in directory `path`, created with `config`, or opened where it was created with the same.

        `config` is a YAML file, a `RunConfig`, a mapping, or None for the defaults; `overrides` such as
        `stages.run.width=2` apply to a file. Relative image and bind paths are relative to the YAML file,
        else to the working directory. Raises, with nothing created: `ConfigError` for a wrong config, a
        directory that cannot be written or one that holds a run with another config, `PluginError` for
        an unknown plug-in, `ImageError` for a missing default image, `UnsafeFilesystemError` for a file
        system that cannot hold a run.
        """
        resolved = read_config(config, overrides)
        provider = check_config(resolved)
        if resolved.sandbox.image is not None:
            provider.check(resolved.sandbox.image)
        return cls(Spool.create(Path(path), resolved))

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The run in directory `path`; raises `ConfigError` where there is none."""
        try:
            return cls(Spool.open(Path(path)))
        except CorruptRecordError:
            raise
        except SpoolError as error:
            raise ConfigError(str(error)) from error

    @property
    def path(self) -> Path:
        """The run directory, absolute."""
        return self._spool.paths.root

    @property
    def config(self) -> RunConfig:
        """The resolved config, fixed at creation."""
        return self._spool.config

    @property
    def submissions(self) -> tuple[Segment, ...]:
        """Every submission so far, oldest first."""
        return self._spool.segments()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The inference servers that are registered and whose heartbeat moves.

        The first look counts as movement: look twice, a heartbeat apart, to tell a dead one. Fixed ones
        of the config (`model.endpoints`) are not listed.
        """
        return self.policy.endpoints(_ENDPOINT_SILENCE_S)

    def submit(
        self, tasks: Path | str | Sequence[Task], *, samples: int = 1, key: str | None = None
    ) -> Submission:
        """Submits `samples` rollouts of each task; durable and visible to workers on return.

        `tasks` is a task file (JSON lines) or tasks; relative paths in a task are relative to the file,
        else to the working directory. The same key with the same content is one submission, whoever
        sends it and however often; without a key, the content's digest is the key. Raises, with nothing
        submitted: `ConfigError` (a broken line by its number, a wrong spec, a key that stands for other
        content), `PluginError` for an unknown handler, `ImageError` for a missing image, `SpoolError`
        where the run is closed or cannot be written.
        """
        # Imported where it is used: who opens a run to read or watch it needs no handlers and no gateway.
        from hpcroll.api.submitting import content_key, read_and_check

        provider = check_config(self.config)
        resolved = read_and_check(tasks, self.config)
        check_images(provider, resolved)
        key = content_key(resolved, samples) if key is None else key
        try:
            return self._spool.submit(resolved, samples=samples, key=key)
        except OSError as error:
            raise ConfigError(
                f"run {self.path} cannot be written ({error.strerror}); nothing was submitted"
            ) from error

    def replenish(
        self,
        tasks: Path | str | Sequence[Task],
        *,
        samples: int,
        key: str,
        groups_per_step: int,
        oversample: float = 1.25,
        steps_ahead: int = 1,
        steps: int | None = None,
        epochs: int | None = None,
        exclude_after: int | None = None,
        seed: int = 0,
        min_usable: int | None = None,
        drop_zero_variance: bool = True,
        max_lag: int | None = None,
    ) -> Pool:
        """Keeps `groups_per_step * oversample * steps_ahead` groups of `tasks` open, step after step.

        For rank 0 of a trainer, as `with run.replenish(...) as pool`, which calls `pool.after(step)` for
        each step of its reader. What a step delivered is replaced by further groups of the task list (each
        epoch in an order of its own, from `seed`), under the submission keys `<key>/<n>`, and so is at once
        what no step will use, by the reader's own `min_usable`, `drop_zero_variance` and `max_lag`. Members
        of groups that are decided early are cancelled, and after step `steps` (with `last=True` after any)
        every open group; the window is told what is settled. It is repeatable: a trainer that restarts
        submits nothing twice. Every group of the run counts, whoever submitted it. `epochs` bounds how
        often the list is gone through, `exclude_after` leaves tasks out that had so many groups without
        variance. Raises what `submit` raises, and `ConfigError` for impossible settings and where `key`
        stands for other tasks, samples or another seed.
        """
        from hpcroll.api.pool_tasks import PoolSettings
        from hpcroll.api.pool_watch import GroupUse
        from hpcroll.api.replenish import Pool
        from hpcroll.api.submitting import read_and_check

        settings = PoolSettings(
            samples=samples,
            key=key,
            groups_per_step=groups_per_step,
            oversample=oversample,
            steps_ahead=steps_ahead,
            steps=steps,
            epochs=epochs,
            exclude_after=exclude_after,
            seed=seed,
            use=GroupUse(min_usable, drop_zero_variance, max_lag),
        )
        provider = check_config(self.config)
        resolved = read_and_check(tasks, self.config)
        check_images(provider, resolved)
        return Pool(self._spool, resolved, settings)

    def submission(self, key: str) -> Segment:
        """The submission with `key`; raises `ConfigError` where there is none."""
        try:
            return self._spool.segment(segment_name(key))
        except CorruptRecordError:
            raise
        except SpoolError as error:
            known = ", ".join(segment.key for segment in self.submissions) or "none"
            raise ConfigError(f"run {self.path} has no submission {key!r}; known: {known}") from error

    def launch(self, *, workers: int, leg: str | None = None, wait: bool = False) -> Sequence[JobHandle]:
        """Starts `workers` workers with the configured launcher, for `leg` or for each leg.

        The handles are recorded in the run. Takes an earlier `drain` back, for new workers only. With
        `wait`, returns when all of them have ended and the run is sealed; `job_states` then tells how.
        Raises, before anything
        starts: `ConfigError` where the run directory cannot be written, the leg is unknown or the agent is
        not installed, `ImageError` for a missing image, `SubmitError` with the scheduler's own words, for
        example for an unknown partition. What only this host lacks is logged as a warning.
        """
        provider = check_config(self.config)
        if self._spool.wishes.closed:
            raise ConfigError(f"run {self.path} is closed; workers would start nothing")
        check_agent(self.config)
        check_model(self.config)
        for segment in self.submissions:
            check_images(provider, (segment.task(index) for index in range(segment.header.tasks)))
        warn_of_missing_capabilities(provider)
        self._undrain()
        handles = start_workers(self.path, self.config, workers=workers, leg=leg)
        if wait:
            self.wait(handles)
        return handles

    def wait(self, handles: Sequence[JobHandle] | None = None) -> SealReport:
        """Returns when all of `handles` (default: every job ever launched) have ended, and seals the run.

        May be interrupted: the workers go on, and `seal` or another `wait` finishes later.
        """
        while any(state in _LIVE for state in self.job_states(handles)):
            time.sleep(_WAIT_POLL_S)
        return self.seal()

    def seal(self, *, gone: Collection[str] = (), close: bool = False) -> SealReport:
        """Finishes what dead workers left; see `api.sealing.seal`. At any time, from any host."""
        return seal(self._spool, gone=gone, close=close)

    def preview(self, *, workers: int, leg: str | None = None) -> str:
        """The scripts that `launch` would submit; submits nothing."""
        check_config(self.config)
        return preview_workers(self.path, self.config, workers=workers, leg=leg)

    def job_states(self, handles: Sequence[JobHandle] | None = None) -> list[JobState]:
        """The state of each of `handles`, of all jobs ever launched where absent.

        A scheduler is asked at most once in `lease.scheduler_poll_s`; between, the last answer stands.
        """
        states = self._ranks.states()
        if handles is None:
            return [state for _, state in states]
        by_id = {handle.job_id: state for handle, state in states}
        return [by_id.get(handle.job_id, JobState.UNKNOWN) for handle in handles]

    def results(
        self, submission: Submission | Segment | str | None = None, *, wait: bool = True
    ) -> Iterator[Result]:
        """The committed results of a submission (or its key), each exactly once, as they are committed.

        Without a submission: those of every submission made before the call. Ends when each of its
        rollouts has its result; with `wait=False`, with what is committed now. Any process may iterate,
        at any time, also after the submitter and the workers are gone; two iterations do not disturb
        each other.
        """
        if isinstance(submission, str):
            submission = self.submission(submission)
        segment = submission.segment if isinstance(submission, Submission) else submission
        segments = self.submissions if segment is None else (segment,)
        return iterate_results(self.path, segments, wait=wait)

    def trajectory(self, rollout_id: str) -> Trajectory:
        """The committed trajectory of a rollout (`SEGMENT/ORDINAL`); raises `ConfigError` for none yet."""
        ref = self._parse(rollout_id)
        if not self._spool.is_done(ref):
            raise ConfigError(f"rollout {rollout_id} has no committed result yet; see `hpcroll status`")
        return open_run(self.path).get(ref.rollout_id).trajectory()

    def partial_trajectory(self, rollout_id: str, *, attempt: int | None = None) -> Trajectory:
        """What an attempt without a result did so far, or did before it was killed; from its journal.

        Of `attempt`, else of the latest attempt that made a model call, also where a result is committed.
        `record.partial` says what became of it. Raises `ConfigError` where there is nothing yet.
        """
        # Imported where it is used: it needs the gateway, which who only reads a run does not.
        from hpcroll.report.partial import partial_trajectory

        return partial_trajectory(self._spool, self._parse(rollout_id), attempt=attempt)

    def look_up(self, rollout_id: str, *, attempt: int | None = None) -> Trajectory:
        """The committed trajectory where there is one and no attempt is named, else the partial one."""
        if attempt is None and self._spool.is_done(self._parse(rollout_id)):
            return self.trajectory(rollout_id)
        return self.partial_trajectory(rollout_id, attempt=attempt)

    def cancel(self, *, key: str | None = None, rollout: str | None = None) -> int:
        """Cancels a submission, one rollout, or, with neither, all that was submitted so far.

        Rollouts that nobody runs are committed as `cancelled` before it returns, and counted; those in
        progress are committed by their workers within seconds. A committed result stays as it is.
        """
        from hpcroll.api.cancellation import commit_cancelled

        wishes = self._spool.wishes
        if rollout is not None:
            ref = self._parse(rollout)
            wishes.cancel(segment=ref.segment, ordinal=ref.ordinal)
        else:
            # By segment and not `all`: later submissions are wanted.
            for segment in self.submissions if key is None else (self.submission(key),):
                wishes.cancel(segment=segment.name)
        return commit_cancelled(self._spool)

    def drain(self) -> None:
        """Has every worker release what it runs and end; waiting jobs leave the scheduler's queue.

        Nothing terminal is written and no retry is spent: `launch` goes on where it stopped. Workers
        see the wish within seconds wherever they are; what cannot be signalled from this host is logged.
        """
        self._spool.wishes.drain()
        for trouble in self._ranks.stop():
            log.warning("%s; its workers drain when they see the wish", trouble)

    def hold(self, key: str | None = None) -> None:
        """Starts nothing more, of one submission or of the run, until `resume`."""
        self._spool.wishes.hold(*self._segment_names(key))

    def resume(self, key: str | None = None) -> None:
        """Takes `hold` back."""
        self._spool.wishes.resume(*self._segment_names(key))

    def retry_failed(self, key: str | None = None) -> list[Submission]:
        """Submits the tasks of failed rollouts again, as whole new groups, under `<key>+retry<k>`.

        A committed result is final, so that a retry is a submission of its own, with as many samples as
        the first. Of submission `key`, or of all. A task is retried once per failure: calling it twice
        submits nothing new.
        """
        return submit_retries(self._spool, self.path, None if key is None else self.submission(key))

    def close(self) -> None:
        """Ends the run for good: no submissions any more, workers start nothing more; results stay."""
        self._spool.wishes.close()

    def status(self, *, exact: bool = False) -> RunStatus:
        """How far the run is, from heartbeats; `exact` also counts names, which lists directories.

        Rates are over the time between this and earlier calls on the same object.
        """
        jobs = self._ranks.states()
        return self._observer.observe(exact=exact, jobs=jobs, job_trouble=self._ranks.trouble)

    def serve(
        self,
        command: Sequence[str],
        *,
        port: int,
        host: str | None = None,
        kind: str | None = None,
        served_name: str | None = None,
        version: int | None = None,
        ready_timeout_s: float = 1800.0,
    ) -> int:
        """Runs an inference server for this run until SIGTERM; see `api.serving.serve`."""
        return serve(
            self.policy,
            command,
            served_name=served_name or self.config.model.served_name,
            policy_name=self.config.model.name,
            port=port,
            host=host,
            kind=kind,
            version=version,
            ready_timeout_s=ready_timeout_s,
        )

    def _undrain(self) -> None:
        """Lets new workers stay, while those that were told to end still do."""
        wishes = self._spool.wishes
        if not wishes.draining(""):
            return
        for worker in self._spool.counts().workers:
            if not worker.ended:
                wishes.drain(worker.info.incarnation)
        wishes.undrain()

    def _segment_names(self, key: str | None) -> tuple[str, ...]:
        return () if key is None else (self.submission(key).name,)

    def _parse(self, rollout_id: str) -> RolloutRef:
        try:
            ref = RolloutRef.parse(rollout_id)
            self._spool.rollout(ref)
        except (ValueError, SpoolError) as error:
            raise ConfigError(f"rollout {rollout_id!r}: {error}") from error
        return ref
