"""Where a run stands: summed from heartbeats, or counted from names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpcroll.contract import FailureClass, Stage, Status
from hpcroll.fs import FANOUT_BITS, RunPaths, list_names
from hpcroll.spool.fanout import FanOut
from hpcroll.spool.heartbeat import Beat, read_beat
from hpcroll.spool.incarnation import WorkerInfo, read_worker
from hpcroll.spool.manifest import Segment


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One incarnation, as its files tell."""

    info: WorkerInfo
    beat: Beat | None
    """Its latest heartbeat; None where it has written none."""
    ended: bool
    """Its parent said that it is gone. False proves nothing: watch whether its beats go on."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """A run's state as of its workers' latest heartbeats."""

    total: int
    """Rollouts submitted."""
    stages: dict[Stage, int]
    """Rollouts in each stage now, of workers that have not ended."""
    statuses: dict[Status, int]
    """Rollouts committed, by status; behind by what was committed since the last heartbeats."""
    failures: dict[FailureClass, int]
    """Failed attempts, by class."""
    workers: tuple[WorkerState, ...]

    @property
    def committed(self) -> int:
        return sum(self.statuses.values())

    @property
    def alive(self) -> int:
        """Workers that have not ended."""
        return sum(not worker.ended for worker in self.workers if worker.info.role == "worker")


@dataclass(frozen=True, slots=True)
class ExactCounts:
    """A run's state as of its names."""

    total: int
    done: dict[str, int]
    """Rollouts done, by leg; in the last leg: that have a committed result."""
    running: dict[str, int]
    """Rollouts with an attempt that has not ended, by leg; its worker may be dead."""
    attempts: dict[str, int]
    """Attempts made, by leg."""


def sum_beats(paths: RunPaths, segments: Sequence[Segment]) -> RunCounts:
    """Sums the heartbeats of every incarnation: one listing, and two reads per incarnation."""
    stages: Counter[Stage] = Counter()
    statuses: Counter[Status] = Counter()
    failures: Counter[FailureClass] = Counter()
    workers = read_workers(paths)
    for worker in workers:
        if worker.beat is None:
            continue
        statuses.update(worker.beat.statuses)
        failures.update(worker.beat.failures)
        if not worker.ended:
            stages.update(worker.beat.stages)
    return RunCounts(
        total=sum(segment.size for segment in segments),
        stages=dict(stages),
        statuses=dict(statuses),
        failures=dict(failures),
        workers=workers,
    )


def read_workers(paths: RunPaths) -> tuple[WorkerState, ...]:
    """Every incarnation that was ever registered, in the order of their names."""
    names = list_names(paths.workers)
    ended = {name.removesuffix(".ended") for name in names if name.endswith(".ended")}
    states = []
    for name in sorted(names):
        incarnation = name.removesuffix(".json")
        info = read_worker(paths.workers / name) if incarnation != name else None
        if info is not None:
            states.append(WorkerState(info, read_beat(paths.beat_file(incarnation)), incarnation in ended))
    return tuple(states)


def count_exactly(paths: RunPaths, legs: Sequence[str], segments: Sequence[Segment]) -> ExactCounts:
    """Counts the names of every rollout: two listings per 4,096 rollouts and leg."""
    done: Counter[str] = Counter()
    running: Counter[str] = Counter()
    attempts: Counter[str] = Counter()
    for leg in legs:
        for segment in segments:
            for first in range(0, segment.size, 1 << FANOUT_BITS):
                fanout = FanOut(segment.name, first, min(first + (1 << FANOUT_BITS), segment.size))
                fanout.list_anew(paths, leg, None, 0.0)
                done[leg] += len(fanout.done)
                running[leg] += sum(1 for _ in fanout.running())
                attempts[leg] += sum(fanout.attempts.values())
    return ExactCounts(
        total=sum(segment.size for segment in segments),
        done={leg: done[leg] for leg in legs},
        running={leg: running[leg] for leg in legs},
        attempts={leg: attempts[leg] for leg in legs},
    )
