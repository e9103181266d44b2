"""How far a run is: summed heartbeats, rates over the observed time, what failed and why."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcroll.contract import Stage, Status
from hpcroll.fs import list_names
from hpcroll.launch import JobHandle, JobState
from hpcroll.policy import Allowance, PolicyRegistry
from hpcroll.report.failures import FailureExample, failure_examples
from hpcroll.spool import Beat, ExactCounts, RunCounts, Spool, WorkerState

_ENDPOINT_SILENCE_S = 60.0
_RATE_WINDOW_S = 600.0
"""Rates are over at most this much observed time, so that they follow changes."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's state at one moment, as far as heartbeats tell."""

    run_dir: str
    run_id: str
    closed: bool
    draining: bool
    total: int
    """Rollouts submitted."""
    committed: int
    statuses: dict[Status, int]
    """Committed rollouts by status."""
    stages: dict[Stage, int]
    """Rollouts in each stage now, of workers that are alive."""
    failures: tuple[FailureExample, ...]
    """Failed attempts by class: most of them are tried again."""
    workers_alive: int
    workers_silent: int
    """Workers without a recorded end whose heartbeat stands still."""
    workers_ended: int
    beat_age_s: float | None
    """Seconds since the latest heartbeat, by its node's clock; for people."""
    jobs: dict[JobState, int]
    """Jobs of all launches by state, the scheduler's last word."""
    job_trouble: str | None
    """Why the scheduler could not be asked, so that `jobs` is old; None where it answered."""
    rate_per_min: float | None
    """Commits per minute over the observed time, on a first look since the first worker started."""
    left_s: float | None
    """Seconds until all is committed, at that rate."""
    shards: int
    shard_bytes: int
    policy_version: int | None
    """The newest published version; None where none is."""
    endpoints: tuple[str, ...]
    """Base URLs of inference servers: those of the config and those that are registered."""
    submissions: tuple[tuple[str, int], ...]
    """Key and size of each submission."""
    exact: ExactCounts | None = None
    """Counted names, where they were asked for."""
    paused_by: tuple[str, ...] = ()
    """Whose pauses of model calls are in force."""
    window: Allowance | None = None
    """How far rollouts may be ahead of the trainer; None where nothing bounds them."""
    waiting_groups: int = 0
    """Groups that the window does not let start yet."""

    @property
    def done(self) -> bool:
        """Whether every submitted rollout has its result."""
        committed = self.committed
        if self.exact is not None:
            committed = list(self.exact.done.values())[-1]
        return committed >= self.total

    def to_dict(self) -> dict[str, Any]:
        """The status as JSON values; keys are those of the fields."""
        exact = self.exact
        return {
            "run_dir": self.run_dir,
            "run_id": self.run_id,
            "closed": self.closed,
            "draining": self.draining,
            "total": self.total,
            "committed": self.committed,
            "done": self.done,
            "statuses": {status.value: count for status, count in self.statuses.items()},
            "stages": {stage.value: count for stage, count in self.stages.items()},
            "failures": [
                {"class": item.failure_class.value, "count": item.count, "example": item.text}
                for item in self.failures
            ],
            "workers": {
                "alive": self.workers_alive,
                "silent": self.workers_silent,
                "ended": self.workers_ended,
                "beat_age_s": self.beat_age_s,
            },
            "jobs": {state.value: count for state, count in self.jobs.items()},
            "job_trouble": self.job_trouble,
            "rate_per_min": self.rate_per_min,
            "left_s": self.left_s,
            "shards": {"files": self.shards, "bytes": self.shard_bytes},
            "policy_version": self.policy_version,
            "paused_by": list(self.paused_by),
            "window": _window_json(self.window, self.waiting_groups),
            "endpoints": list(self.endpoints),
            "submissions": [{"key": key, "rollouts": size} for key, size in self.submissions],
            "exact": None
            if exact is None
            else {"done": exact.done, "running": exact.running, "attempts": exact.attempts},
        }


@dataclass(slots=True)
class _Seen:
    counter: int
    changed_at: float


@dataclass(slots=True)
class StatusObserver:
    """Observes one run; what changes between its observations gives rates and tells who is alive.

    A single observation cannot tell a silent worker from a living one: no two nodes' clocks are compared.
    """

    spool: Spool
    clock: Callable[[], float] = time.monotonic
    registry: PolicyRegistry = field(init=False)
    _history: deque[tuple[float, int]] = field(default_factory=deque)
    _beats: dict[str, _Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.registry = PolicyRegistry(self.spool.paths, name=self.spool.config.model.name)

    def observe(
        self,
        *,
        exact: bool = False,
        jobs: Sequence[tuple[JobHandle, JobState]] = (),
        job_trouble: str | None = None,
    ) -> RunStatus:
        """The run's status now."""
        spool, now = self.spool, self.clock()
        counts = spool.counts()
        alive, silent, ended = self._workers(counts, now)
        rate_per_min = self._rate(now, counts)
        left = counts.total - counts.committed
        files = [name for name in list_names(spool.paths.shards) if name.endswith(".shard")]
        latest = self.registry.latest()
        window = self.registry.allowance()
        groups = sum(segment.header.tasks for segment in spool.segments())
        return RunStatus(
            run_dir=str(spool.paths.root),
            run_id=spool.run_id,
            closed=spool.wishes.closed,
            draining=spool.wishes.draining(""),
            total=counts.total,
            committed=counts.committed,
            statuses=counts.statuses,
            stages=_stages(counts),
            failures=failure_examples(spool.paths, counts),
            workers_alive=alive,
            workers_silent=silent,
            workers_ended=ended,
            beat_age_s=_beat_age(counts),
            jobs=dict(Counter(state for _, state in jobs)),
            job_trouble=job_trouble,
            rate_per_min=rate_per_min,
            left_s=60 * left / rate_per_min if rate_per_min else None,
            shards=len(files),
            shard_bytes=sum((spool.paths.shards / name).stat().st_size for name in files),
            policy_version=None if latest is None else latest.version,
            endpoints=(*spool.config.model.endpoints, *self._registered()),
            submissions=tuple((segment.key, segment.size) for segment in spool.segments()),
            exact=spool.exact_counts() if exact else None,
            paused_by=tuple(pause.name for pause in self.registry.pauses()),
            window=window if window.bounds is not None else None,
            waiting_groups=0 if window.limit is None else max(0, groups - window.limit),
        )

    def _registered(self) -> list[str]:
        return [endpoint.url for endpoint in self.registry.endpoints(_ENDPOINT_SILENCE_S)]

    def _workers(self, counts: RunCounts, now: float) -> tuple[int, int, int]:
        workers = [worker for worker in counts.workers if worker.info.role == "worker"]
        open_ones = [worker for worker in workers if not worker.ended]
        silent = sum(self._is_silent(worker, now) for worker in open_ones)
        return len(open_ones) - silent, silent, len(workers) - len(open_ones)

    def _is_silent(self, worker: WorkerState, now: float) -> bool:
        counter = _counter(worker.beat)
        seen = self._beats.setdefault(worker.info.incarnation, _Seen(counter, now))
        if counter != seen.counter:
            seen.counter, seen.changed_at = counter, now
        return now - seen.changed_at > self.spool.config.lease.silence_s

    def _rate(self, now: float, counts: RunCounts) -> float | None:
        committed = counts.committed
        self._history.append((now, committed))
        while now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()
        first_at, first = self._history[0]
        if committed > first:
            return 60 * (committed - first) / (now - first_at)
        # A first look has nothing to compare with: the average so far, by wall clocks, is better than none.
        started = [worker.info.started_at for worker in counts.workers if worker.info.role == "worker"]
        span_s = time.time() - min(started, default=time.time())
        return 60 * committed / span_s if len(self._history) == 1 and committed and span_s > 0 else None


def _window_json(window: Allowance | None, waiting_groups: int) -> dict[str, int | None] | None:
    if window is None:
        return None
    return {"limit": window.limit, "settled": window.settled, "waiting_groups": waiting_groups}


def _counter(beat: Beat | None) -> int:
    return 0 if beat is None else beat.counter


def _stages(counts: RunCounts) -> dict[Stage, int]:
    return {stage: counts.stages.get(stage, 0) for stage in Stage}


def _beat_age(counts: RunCounts) -> float | None:
    written = [worker.beat.written_at for worker in counts.workers if worker.beat is not None]
    return max(0.0, time.time() - max(written)) if written else None
