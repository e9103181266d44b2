"""The spool: a job queue on a shared file system that needs no server; `done` names are its only truth."""

from hpcroll.spool.attempts import AttemptEnd, poisoned_by, read_end
from hpcroll.spool.claim import Claim, sync_done_directories
from hpcroll.spool.claims import Claims
from hpcroll.spool.counts import ExactCounts, RunCounts, WorkerState, read_workers
from hpcroll.spool.events import Event, EventLog, read_events
from hpcroll.spool.heartbeat import Beat, BeatCounts, Heartbeat, read_beat
from hpcroll.spool.incarnation import (
    Incarnation,
    WorkerEnd,
    WorkerInfo,
    mark_ended,
    read_worker,
    started_ticks,
)
from hpcroll.spool.liveness import JobEnded
from hpcroll.spool.manifest import Segment, SegmentHeader, segment_name
from hpcroll.spool.record import RunRecord
from hpcroll.spool.spool import Spool
from hpcroll.spool.submission import Submission
from hpcroll.spool.wishes import Wishes

__all__ = [
    "AttemptEnd",
    "Beat",
    "BeatCounts",
    "Claim",
    "Claims",
    "Event",
    "EventLog",
    "ExactCounts",
    "Heartbeat",
    "Incarnation",
    "JobEnded",
    "RunCounts",
    "RunRecord",
    "Segment",
    "SegmentHeader",
    "Spool",
    "Submission",
    "Wishes",
    "WorkerEnd",
    "WorkerInfo",
    "WorkerState",
    "mark_ended",
    "poisoned_by",
    "read_beat",
    "read_end",
    "read_events",
    "read_worker",
    "read_workers",
    "segment_name",
    "started_ticks",
    "sync_done_directories",
]
