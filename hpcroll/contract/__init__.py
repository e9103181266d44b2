"""The contract: the records that submitters, workers and trainers exchange, each of them versioned.

Models are imported when first asked for: building them costs more than all else that a reader imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcroll.contract.canonical import canonical_json, parse_version, require_major, sha256_hex
from hpcroll.contract.ref import RolloutRef, group_id
from hpcroll.contract.status import EndReason, FailureClass, Stage, Status, StopReason
from hpcroll.contract.tokens import (
    ExtraColumn,
    Flags,
    Floats,
    Ids,
    LogprobKind,
    Ragged,
    SegmentTokens,
    Trajectory,
)

if TYPE_CHECKING:
    from hpcroll.contract.call import (
        Call,
        CallPurpose,
        CallTokens,
        FoldedPrompt,
        Latency,
        PolicyId,
        RecordedCall,
        Rendering,
        Sampling,
        Usage,
        VersionSpan,
    )
    from hpcroll.contract.schema import Frozen, Record
    from hpcroll.contract.task import Name, Rollout, Task
    from hpcroll.contract.trajectory import (
        Action,
        CallSpan,
        ContextSpan,
        Dropped,
        Failure,
        Parent,
        PolicyRun,
        Resources,
        Segment,
        SegmentRole,
        SegmentStart,
        SpanRole,
        StageTiming,
        Timing,
        TrajectoryRecord,
    )
    from hpcroll.contract.verdict import Verdict

_MODELS = {
    "Call": "call",
    "CallPurpose": "call",
    "CallTokens": "call",
    "FoldedPrompt": "call",
    "Latency": "call",
    "PolicyId": "call",
    "RecordedCall": "call",
    "Rendering": "call",
    "Sampling": "call",
    "Usage": "call",
    "VersionSpan": "call",
    "Frozen": "schema",
    "Record": "schema",
    "Name": "task",
    "Rollout": "task",
    "Task": "task",
    "Action": "trajectory",
    "CallSpan": "trajectory",
    "ContextSpan": "trajectory",
    "Dropped": "trajectory",
    "Failure": "trajectory",
    "Parent": "trajectory",
    "PolicyRun": "trajectory",
    "Resources": "trajectory",
    "Segment": "trajectory",
    "SegmentRole": "trajectory",
    "SegmentStart": "trajectory",
    "SpanRole": "trajectory",
    "StageTiming": "trajectory",
    "Timing": "trajectory",
    "TrajectoryRecord": "trajectory",
    "Verdict": "verdict",
}


def __getattr__(name: str) -> Any:
    home = _MODELS.get(name)
    if home is None:
        raise AttributeError(f"module 'hpcroll.contract' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"hpcroll.contract.{home}"), name)
    return found


__all__ = [
    "Action",
    "Call",
    "CallPurpose",
    "CallSpan",
    "CallTokens",
    "ContextSpan",
    "Dropped",
    "EndReason",
    "ExtraColumn",
    "Failure",
    "FailureClass",
    "Flags",
    "Floats",
    "FoldedPrompt",
    "Frozen",
    "Ids",
    "Latency",
    "LogprobKind",
    "Name",
    "Parent",
    "PolicyId",
    "PolicyRun",
    "Ragged",
    "Record",
    "RecordedCall",
    "Rendering",
    "Resources",
    "Rollout",
    "RolloutRef",
    "Sampling",
    "Segment",
    "SegmentRole",
    "SegmentStart",
    "SegmentTokens",
    "SpanRole",
    "Stage",
    "StageTiming",
    "Status",
    "StopReason",
    "Task",
    "Timing",
    "Trajectory",
    "TrajectoryRecord",
    "Usage",
    "Verdict",
    "VersionSpan",
    "canonical_json",
    "group_id",
    "parse_version",
    "require_major",
    "sha256_hex",
]
