"""Which incarnations without a recorded end are dead for certain, said by whoever can know."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths, read_fresh
from hpcroll.launch.identity import host_is_this, this_boot
from hpcroll.spool import Spool, WorkerInfo, WorkerState, read_workers, started_ticks
from hpcroll.worker.scheduler import SlurmJobs

_WATCHED_BEATS = 2
"""Heartbeats for which a worker must stand still before anybody's word of its death is believed."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of the incarnations that have no recorded end; each stands in one of the three."""

    dead: dict[str, str]
    """Why each is dead for certain."""
    alive: frozenset[str]
    """Seen to live: their process or job runs."""
    unsure: dict[str, str]
    """Why nobody here can say: they may live, so that they are left alone."""


def judge_workers(
    spool: Spool,
    *,
    gone: Collection[str] = (),
    jobs: SlurmJobs | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Judgement:
    """Asks this node's kernel and Slurm about every incarnation without a recorded end.

    `gone` are incarnations that an operator says are dead. Slurm's word and the operator's count only for
    a worker whose heartbeat stands still meanwhile, which takes two heartbeats of time: Slurm may be
    another cluster's, an operator may err. Silence alone proves nothing. Raises `ConfigError` for a name
    in `gone` that is no incarnation of the run, or that lives.
    """
    workers = read_workers(spool.paths)
    _require_known(gone, workers)
    open_ones = [worker.info for worker in workers if not worker.ended]
    jobs = jobs or SlurmJobs(spool.config.lease.scheduler_poll_s)
    jobs.ask(open_ones)
    dead: dict[str, str] = {}
    alive: set[str] = set()
    unsure: dict[str, str] = {}
    told: dict[str, str] = {}
    for info in open_ones:
        process, job = process_gone(info), jobs.ended(info)
        if process is not None:
            dead.update({info.incarnation: "its process is gone"} if process else {})
            alive.update(() if process else (info.incarnation,))
        elif info.incarnation in gone:
            told[info.incarnation] = "its end was declared by hand"
        elif job is not None:
            told.update({info.incarnation: f"Slurm says that job {info.job_id} has ended"} if job else {})
            alive.update(() if job else (info.incarnation,))
        else:
            unsure[info.incarnation] = _why_unsure(info)
    moving = _moving(spool.paths, told, _WATCHED_BEATS * spool.config.lease.beat_s, sleep)
    for incarnation, why in told.items():
        if incarnation in moving:
            alive.add(incarnation)
        else:
            dead[incarnation] = why
    _require_dead(gone, alive)
    return Judgement(dead, frozenset(alive), unsure)


def process_gone(info: WorkerInfo) -> bool | None:
    """Whether the process of an incarnation is gone; None where this node cannot tell."""
    if info.boot_id != this_boot():
        # Its node was started again since, unless another one has the same name.
        return True if host_is_this(info.host) else None
    if info.pid_namespace != str(Path("/proc/self/ns/pid").readlink()):
        return None
    try:
        os.kill(info.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return None  # another user's process, which /proc may hide
    return started_ticks(info.pid) != info.started_ticks if info.started_ticks is not None else None


def _why_unsure(info: WorkerInfo) -> str:
    if info.job_id is not None:
        return f"Slurm does not answer for job {info.job_id}; it ran on {info.host}"
    return f"it ran on {info.host}, outside of Slurm, and only its user on that node can tell"


def _moving(
    paths: RunPaths, incarnations: Iterable[str], watch_s: float, sleep: Callable[[float], None]
) -> set[str]:
    """Those whose heartbeat changes while they are watched for `watch_s` seconds."""
    before = {name: read_fresh(paths.beat_file(name)) for name in incarnations}
    if not before:
        return set()
    sleep(watch_s)
    return {name for name, beat in before.items() if read_fresh(paths.beat_file(name)) != beat}


def _require_known(gone: Collection[str], workers: Iterable[WorkerState]) -> None:
    unknown = set(gone) - {worker.info.incarnation for worker in workers}
    if unknown:
        raise ConfigError(
            f"no incarnation of this run is named {', '.join(sorted(unknown))}; `hpcroll shards seal` lists "
            "those of which nobody knows whether they live"
        )


def _require_dead(gone: Collection[str], alive: Collection[str]) -> None:
    living = set(gone) & set(alive)
    if living:
        raise ConfigError(
            f"{', '.join(sorted(living))} lives: its process runs or its heartbeat moves; stop it first, "
            "`hpcroll drain` does"
        )
