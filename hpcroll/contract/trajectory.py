"""The trajectory: the record of one rollout, with every sampled token's provenance."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field, JsonValue

from hpcroll.contract.call import Call
from hpcroll.contract.schema import Frozen, Record
from hpcroll.contract.status import EndReason, FailureClass, Stage, Status, StopReason
from hpcroll.contract.verdict import Verdict


class SegmentRole(StrEnum):
    MAIN = "main"
    SUBAGENT = "subagent"
    AUXILIARY = "auxiliary"


class SegmentStart(StrEnum):
    """Why a segment began."""

    START = "start"
    CONTEXT_REWRITTEN = "context_rewritten"
    """The conversation's past was changed: compacted, edited, or a reply rendered in other tokens."""
    SUBAGENT = "subagent"
    """A conversation of its own, which may share its opening with another."""
    RETRY = "retry"
    """The very same prompt was asked more than once; the line goes on from another of the replies."""
    BRANCH = "branch"
    """An unchanged past was gone on from twice; the line goes on elsewhere."""


class SpanRole(StrEnum):
    """Whose words a context span is."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    ASSISTANT = "assistant"
    TEMPLATE = "template"
    UNKNOWN = "unknown"
    """The server rendered the prompt and did not say."""


class Parent(Frozen):
    """A segment's fork point: the first `length` tokens of segment `segment_index`."""

    segment_index: int = Field(ge=0)
    length: int = Field(ge=0)


class PolicyRun(Frozen):
    """Tokens [start, start + length) of a segment were sampled by this policy.

    `version_low == version_high` only where the engine itself said so.
    """

    start: int = Field(ge=0)
    length: int = Field(ge=1)
    policy_name: str
    lineage: str
    version_low: int = Field(ge=0)
    version_high: int = Field(ge=0)


class ContextSpan(Frozen):
    """Tokens [start, start + length) of a segment are context of this role."""

    start: int = Field(ge=0)
    length: int = Field(ge=1)
    role: SpanRole


class Segment(Frozen):
    """One unbroken token sequence of length `length`; its arrays are in `SegmentTokens`."""

    segment_index: int = Field(ge=0)
    parent: Parent | None = None
    role: SegmentRole = SegmentRole.MAIN
    began: SegmentStart = SegmentStart.START
    ended: str = ""
    length: int = Field(ge=0)
    weight: float = Field(ge=0)
    """This segment's share of the rollout; the shares of a rollout add up to its `rollout_weight`."""
    policy_runs: tuple[PolicyRun, ...] = ()
    context_spans: tuple[ContextSpan, ...] = ()


class CallSpan(Frozen):
    """Where call `call_index` stands: its prompt ends and its samples begin at `start`."""

    call_index: int = Field(ge=0)
    segment_index: int = Field(ge=0)
    start: int = Field(ge=0)
    length: int = Field(ge=0)


class Dropped(Frozen):
    """Sampled tokens of a call that stand in no segment, and why."""

    call_index: int = Field(ge=0)
    length: int = Field(ge=0)
    reason: str


class Action(Frozen):
    """One tool call of the agent."""

    call_index: int | None
    """The model call that asked for it; None where a black-box agent does not say."""
    name: str
    argument_sha256: str
    started_s: float
    """Seconds since the run stage began."""
    duration_s: float = Field(ge=0)
    exit_code: int | None = None
    timed_out: bool = False
    output_bytes: int = Field(default=0, ge=0)
    output_truncated: bool = False


class Failure(Frozen):
    """Why an attempt gave no result."""

    attempt: int = Field(ge=1)
    reason: EndReason
    failure_class: FailureClass | None = None
    """None for a planned stop."""
    stage: Stage | None = None
    error: str = ""
    """The error's type."""
    message: str = ""
    node: str = ""
    incarnation: str = ""


class StageTiming(Frozen):
    """Unix seconds on the worker's node; for people, never compared between nodes."""

    started_at: float
    duration_s: float = Field(ge=0)


class Timing(Frozen):
    submitted_at: float | None = None
    claimed_at: float | None = None
    init: StageTiming | None = None
    run: StageTiming | None = None
    eval: StageTiming | None = None


class Resources(Frozen):
    """Where the rollout ran and what its payload used; None where it was not measured."""

    node: str = ""
    slurm_job: str | None = None
    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    written_bytes: int | None = None


class TrajectoryRecord(Record):
    """Everything of a trajectory but its token arrays.

    Immutable once committed: a later verdict is an overlay that names the record, never an edit.
    """

    SCHEMA: ClassVar[str] = "1.0"

    # identity
    run_id: str
    rollout_id: str
    group_id: str
    group_size: int = Field(ge=1)
    sample_index: int = Field(ge=0)
    task_id: str
    task_sha256: str
    dataset: str = ""
    attempt: int = Field(ge=1)
    incarnation: str
    handler: str
    harness: str
    harness_version: str
    image_sha256: str | None = None
    config_sha256: str

    # what happened
    status: Status
    stop_reason: StopReason
    failure: Failure | None = None
    attempts: tuple[Failure, ...] = ()
    """The earlier attempts, oldest first."""
    partial: str | None = None
    """What became of the attempt, where the record was put together from its journal and nothing of it was
    committed; None for a committed record."""
    trainable: bool
    not_trainable_because: tuple[str, ...] = ()
    verdict: Verdict | None = None
    reward: float | None = None
    """The outcome reward of the rollout; None is not 0.0."""
    reward_valid: bool = False
    rollout_weight: float = Field(default=1.0, ge=0)

    # tokens, calls, actions
    segments: tuple[Segment, ...] = ()
    calls: tuple[Call, ...] = ()
    call_spans: tuple[CallSpan, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    actions: tuple[Action, ...] = ()
    gaps: tuple[str, ...] = ()
    """What is known to be missing from the record, never silently."""
    answer: str | None = None
    """What the agent submitted, where its harness has such a thing."""

    timing: Timing = Timing()
    resources: Resources = Resources()
    model_name: str = ""
    tokenizer_sha256: str | None = None
    template_sha256: str | None = None
    """None where the server rendered unseen."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further columns; readers ignore what they do not know."""
