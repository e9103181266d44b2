"""Commits `cancelled` for every cancelled rollout that nobody runs."""

from __future__ import annotations

import time
from itertools import islice

from hpcroll.contract import Status, StopReason
from hpcroll.plugins import Family, load
from hpcroll.shards import RecordAddress, ShardWriter
from hpcroll.spool import (
    BeatCounts,
    Claim,
    Claims,
    Heartbeat,
    Incarnation,
    Spool,
    WorkerInfo,
    mark_ended,
    sync_done_directories,
)
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.pools import Flight

_BATCH = 256
"""Rollouts that share the fsyncs of a commit."""


def commit_cancelled(spool: Spool) -> int:
    """Commits the cancelled rollouts that no worker runs, leg by leg; how many.

    The calling process is an incarnation while it does so. Those in progress are committed by their
    workers, which look at the operator's wishes every second. Safe to repeat and to interrupt.
    """
    return sum(_commit_leg(spool, leg) for leg in spool.config.leg_names)


def _commit_leg(spool: Spool, leg: str) -> int:
    incarnation = Incarnation.register(spool, leg=leg, rank=0, role="cancel")
    try:
        with ShardWriter(spool.paths, incarnation.id, spool.config.shards) as writer:
            return _Canceller(spool, incarnation, writer).run()
    finally:
        mark_ended(spool.paths, incarnation.id)


class _Canceller:
    """One incarnation that commits nothing but cancellations."""

    def __init__(self, spool: Spool, incarnation: Incarnation, writer: ShardWriter) -> None:
        self._spool = spool
        self._incarnation = incarnation
        self._writer = writer
        self._heartbeat = Heartbeat(incarnation)
        self._count = 0
        harness = spool.config.harness
        version = load(Family.HARNESS, harness.name)(harness).version
        self._assembly = Assembly(spool, incarnation, harness=harness.name, harness_version=version)

    def run(self) -> int:
        """Commits what there is and returns how many; its last heartbeat says so to `status`."""
        claims = Claims(self._spool, self._incarnation, job_ended=_nobody_knows).cancelled()
        self._beat()
        beaten_at = time.monotonic()
        while batch := list(islice(claims, _BATCH)):
            self._commit(batch)
            if time.monotonic() - beaten_at > self._spool.config.lease.beat_s:
                self._beat()
                beaten_at = time.monotonic()
        self._beat()
        return self._count

    def _commit(self, batch: list[Claim]) -> None:
        addresses = [(claim, self._append(claim)) for claim in batch]
        self._writer.sync()
        for claim in batch:
            claim.link_done()
        sync_done_directories(batch)
        self._writer.mark([address for claim, address in addresses if claim.won])
        self._count += sum(claim.won for claim in batch)

    def _append(self, claim: Claim) -> RecordAddress:
        draft = self._assembly.abandoned(claim, status=Status.CANCELLED, stop_reason=StopReason.CANCELLED)
        claim.note_record()
        return self._writer.append(self._assembly.finish(draft, Flight(claim), None))

    def _beat(self) -> None:
        self._heartbeat.beat(BeatCounts(statuses={Status.CANCELLED: self._count}))


def _nobody_knows(_worker: WorkerInfo) -> None:
    """Asking the scheduler is the workers' business: what they hold is theirs to cancel."""
