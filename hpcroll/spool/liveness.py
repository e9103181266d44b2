"""Which incarnations are gone: by word of their parent, of the scheduler, or by their silence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcroll.config import LeaseConfig
from hpcroll.contract import EndReason
from hpcroll.fs import list_names, read_fresh
from hpcroll.spool.incarnation import OTHER_ROLE, Incarnation, WorkerInfo, mark_of, read_worker

JobEnded = Callable[[WorkerInfo], bool | None]
"""True where that incarnation's job is over, False where it runs, None where nobody can say."""

WATCHED = 16
"""Workers that each worker watches: all would cost the file server a read per pair of workers and beat."""

_ASK_AFTER_BEATS = 2
"""Silent heartbeats after which the scheduler is asked about a worker."""


@dataclass(slots=True)
class _Watched:
    info: WorkerInfo
    beat: bytes | None
    changed_at_s: float
    """On our pulse: from when on its silence counts."""


class Liveness:
    """What one incarnation knows of all others. Not thread-safe; its owner serialises.

    Death is only ever a reason to try a takeover; who wins is settled by names. A worker that was thought
    silent and beats again is alive again.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        lease: LeaseConfig,
        *,
        job_ended: JobEnded,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._paths = incarnation.paths
        self._lease = lease
        self._job_ended = job_ended
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._ended: set[str] = set()
        self._silent: set[str] = set()
        self._peers: list[str] = []
        self._looked_at_s: float | None = None
        self.changes = 0
        """Grows whenever somebody is found gone."""

    def gone(self, incarnation: str) -> EndReason | None:
        """Why the rollouts of `incarnation` may be taken over; None where they may not."""
        if incarnation in self._ended:
            return EndReason.KILL
        return EndReason.SILENCE if incarnation in self._silent else None

    @property
    def any_gone(self) -> bool:
        return bool(self._ended or self._silent)

    def host(self, incarnation: str) -> str:
        """The node of an incarnation that was seen alive; empty for any other."""
        watched = self._watched.get(incarnation)
        return watched.info.host if watched is not None else ""

    def place(self) -> tuple[int, int]:
        """Our index among the living workers of our leg, and how many they are, us included.

        Others may see other workers just now: then two of them try the same name, and one gets it.
        """
        peers = [name for name in self._peers if self.gone(name) is None]
        return sum(name < self._incarnation.id for name in peers), len(peers) + 1

    def look(self) -> None:
        """Looks around once per heartbeat interval: one listing, and one read per worker that we watch."""
        now_s = self._clock()
        if self._looked_at_s is not None and now_s - self._looked_at_s < self._lease.beat_s:
            return
        self._looked_at_s = now_s
        known = len(self._ended) + len(self._silent)
        names = list_names(self._paths.workers)
        self._ended |= {name.removesuffix(".ended") for name in names if name.endswith(".ended")}
        living = {name.removesuffix(".json") for name in names if name.endswith(".json")} - self._ended
        living.discard(self._incarnation.id)
        mark = mark_of(self._incarnation.id)
        self._peers = [name for name in living if mark_of(name) == mark]
        for incarnation in self._to_watch(living):
            self._look_at(incarnation)
        self.changes += len(self._ended) + len(self._silent) != known

    def _to_watch(self, living: set[str]) -> set[str]:
        """The next workers of our leg in the ring of names, so that each is watched by some, not by all.

        Also every command that claims, and who was silent when we last looked: it may beat again.
        """
        ours = self._incarnation.id
        ring = sorted(self._peers, key=lambda name: (name < ours, name))
        neighbours = [name for name in ring if name not in self._silent][:WATCHED]
        commands = {name for name in living if mark_of(name) == OTHER_ROLE}
        return commands | set(neighbours) | (self._silent & living)

    def _look_at(self, incarnation: str) -> None:
        watched = self._watched.get(incarnation)
        # Opened and read before our own clock is: what was written in between counts for the worker.
        beat = read_fresh(self._paths.beat_file(incarnation))
        if watched is None:
            info = read_worker(self._paths.worker_file(incarnation))
            if info is not None:
                self._watched[incarnation] = _Watched(info, beat, self._incarnation.pulse.ahead_s())
            return
        if beat != watched.beat:
            watched.beat = beat
            watched.changed_at_s = self._incarnation.pulse.ahead_s()
            self._silent.discard(incarnation)
            return
        self._judge(watched)

    def _judge(self, watched: _Watched) -> None:
        silent_s = self._incarnation.pulse.good_s - watched.changed_at_s
        if silent_s >= self._lease.silence_s:
            self._silent.add(watched.info.incarnation)
        if silent_s >= _ASK_AFTER_BEATS * self._lease.beat_s and self._job_ended(watched.info):
            self._ended.add(watched.info.incarnation)
