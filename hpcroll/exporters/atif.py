"""ATIF: Harbor's Agent Trajectory Interchange Format, one document per rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from hpcroll.config import Strict
from hpcroll.contract import Call, CallSpan, SegmentRole, TrajectoryRecord
from hpcroll.exporters.atif_steps import StepBuilder
from hpcroll.exporters.base import Fact, Part, Unit
from hpcroll.exporters.conversation import whole_requests, whole_text
from hpcroll.exporters.json_text import json_text
from hpcroll.shards import Column, StoredTrajectory

SCHEMA = "ATIF-v1.7"


class AtifOptions(Strict):
    """Options of the format `atif`."""

    prompt_ids: bool = False
    """Write each call's prompt ids, too: they repeat all that came before, so that files grow with the square
    of the turns."""


class Atif:
    """`<segment>-<ordinal>.json`: the conversation as steps; token ids and log-probabilities of each reply
    in its `metrics`, entry i of token i.

    Calls of subagents and side calls are `subagent_trajectories`. What ATIF does not know is in `extra`: the
    reward and its components in that of the trajectory, the policy's version and where the reply stands in
    the segments in that of a step.
    """

    Options: ClassVar[type[Strict]] = AtifOptions
    loses: ClassVar[tuple[Fact, ...]] = (
        Fact.CONTEXT,
        Fact.ACTIONS,
        Fact.TIMING,
    )
    source: ClassVar[str] = (
        "harbor 0.26.0 (laude-institute/harbor, RFC 0001): harbor/models/trajectories/*.py, "
        "harbor/utils/trajectory_validator.py"
    )
    columns: ClassVar[frozenset[Column]] = frozenset(Column)
    unit: ClassVar[Unit] = Unit.ROLLOUT
    groups_per_part: int | None = None

    def __init__(self, options: AtifOptions) -> None:
        self._options = options

    def names(self, number: int) -> tuple[str, ...]:
        return ()

    def files(self, part: Part) -> Iterator[tuple[str, bytes]]:
        for member in part.members:
            name = f"{member.rollout_id.replace('/', '-')}.json"
            document = whole_text(self._document(member))
            yield name, json_text(document, indent=1).encode()

    def _document(self, stored: StoredTrajectory) -> dict[str, Any]:
        record = stored.record
        spans = {span.call_index: span for span in record.call_spans}
        lines: dict[str, list[Call]] = {SegmentRole.MAIN: []}
        for call in record.calls:
            lines.setdefault(_line_of(record, spans.get(call.call_index)), []).append(call)
        main = self._trajectory(stored, lines.pop(SegmentRole.MAIN), rollout_id=stored.rollout_id)
        main["extra"] = _outcome(record)
        if lines:
            main["subagent_trajectories"] = [
                self._trajectory(stored, calls, rollout_id=f"{stored.rollout_id}.{name}")
                for name, calls in lines.items()
            ]
        return main

    def _trajectory(
        self, stored: StoredTrajectory, calls: Sequence[Call], *, rollout_id: str
    ) -> dict[str, Any]:
        record = stored.record
        builder = StepBuilder(stored.tokens, prompt_ids=self._options.prompt_ids)
        spans = {span.call_index: span for span in record.call_spans}
        requests = whole_requests(record.calls)
        for call in calls:
            moment = datetime.fromtimestamp(call.started_at, UTC).isoformat()
            builder.add(call, requests[call.call_index], spans.get(call.call_index), moment)
        return {
            "schema_version": SCHEMA,
            "session_id": stored.rollout_id,
            "trajectory_id": rollout_id,
            "agent": {
                "name": record.harness,
                "version": record.harness_version,
                "model_name": record.model_name or (calls[0].model_name if calls else ""),
            },
            "steps": builder.steps(),
            "final_metrics": builder.totals(),
        }


def _line_of(record: TrajectoryRecord, span: CallSpan | None) -> str:
    """The name of the line of calls that a call belongs to; calls without tokens count to the main one."""
    if span is None:
        return SegmentRole.MAIN
    segment = record.segments[span.segment_index]
    return segment.role if segment.role is SegmentRole.MAIN else f"{segment.role}{segment.segment_index}"


def _outcome(record: TrajectoryRecord) -> dict[str, Any]:
    """What of a record no step says."""
    left_out = {"calls", "call_spans", "actions", "timing", "resources"}
    return {"hpcroll": record.model_dump(mode="json", exclude=left_out)}
