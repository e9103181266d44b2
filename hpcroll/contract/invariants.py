"""What holds for every trajectory, as far as its record can show; each violation is one line of text.

The numbers are those of "Invariants" in docs/reference/trajectory.md. That the result depends on no worker
or node (7) takes two records to show and is not checked here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcroll.contract.tokens import Flags, LogprobKind, SegmentTokens, Trajectory

if TYPE_CHECKING:
    from hpcroll.contract.call import Call, RecordedCall
    from hpcroll.contract.trajectory import CallSpan, Segment, TrajectoryRecord

_WEIGHT_TOLERANCE = 1e-6
_DTYPES = {"ids": np.uint32, "sampled": np.uint8, "loss_mask": np.uint8, "logprobs": np.float32}


def check(
    trajectory: Trajectory,
    calls: Sequence[RecordedCall] | None = None,
    *,
    allow_shaped_logprobs: bool = False,
) -> tuple[str, ...]:
    """The violations of `trajectory`, each naming its invariant; empty where there are none.

    `calls` are the recorded calls of the attempt; without them invariant 4 cannot be checked, and 3 only
    against the counts that the record itself keeps. `allow_shaped_logprobs`: the config opted in to
    training on log-probabilities that are not those of the sampling distribution.
    """
    record, tokens = trajectory.record, trajectory.tokens
    if len(record.segments) != len(tokens):
        return (f"1: {len(record.segments)} segments have {len(tokens)} sets of token arrays",)
    shape = [line for pair in zip(record.segments, tokens, strict=True) for line in _shape(*pair)]
    if shape:
        return tuple(shape)  # the other checks index these arrays
    return (
        *(line for pair in zip(record.segments, tokens, strict=True) for line in _facts(*pair)),
        *_parents(trajectory),
        *_placement(trajectory),
        *_policies(trajectory),
        *(_against_journal(trajectory, calls) if calls is not None else ()),
        *_outcome(record),
        *(() if allow_shaped_logprobs else _shaped(trajectory)),
    )


def _shape(segment: Segment, tokens: SegmentTokens) -> Iterator[str]:
    where = f"segment {segment.segment_index}"
    for name, dtype in _DTYPES.items():
        column = getattr(tokens, name)
        if column.dtype != dtype or column.shape != (segment.length,):
            yield (
                f"1: {where}: {name} is {column.dtype}{list(column.shape)}, "
                f"expected {np.dtype(dtype)}[{segment.length}]"
            )


def _facts(segment: Segment, tokens: SegmentTokens) -> Iterator[str]:
    where = f"segment {segment.segment_index}"
    covered: Flags = np.zeros(segment.length, np.uint8)
    for run in segment.policy_runs:
        if run.start + run.length > segment.length:
            yield f"1: {where}: a policy run ends at {run.start + run.length} of {segment.length} tokens"
        covered[run.start : run.start + run.length] += 1
        if run.version_low > run.version_high:
            yield f"1: {where}: policy run versions {run.version_low} > {run.version_high}"
    if not np.array_equal(covered, tokens.sampled):
        yield f"1: {where}: policy runs do not cover exactly the sampled tokens"
    if tokens.sampled.size and (tokens.sampled.max() > 1 or tokens.loss_mask.max() > 1):
        yield f"2: {where}: sampled and loss_mask hold other values than 0 and 1"
    if not np.array_equal(np.isfinite(tokens.logprobs), tokens.sampled == 1):
        yield f"2: {where}: log-probabilities are not finite exactly where tokens were sampled"
    if not np.array_equal(np.isnan(tokens.logprobs), tokens.sampled == 0):
        yield f"2: {where}: log-probabilities are not NaN exactly where tokens are context"
    if np.any(tokens.loss_mask > tokens.sampled):
        yield f"2: {where}: loss_mask selects tokens that no policy sampled"


def _parents(trajectory: Trajectory) -> Iterator[str]:
    for position, segment in enumerate(trajectory.record.segments):
        where = f"segment {segment.segment_index}"
        if segment.segment_index != position:
            yield f"3: {where} stands at position {position}"
        parent = segment.parent
        if parent is None:
            continue
        if parent.segment_index >= position:
            yield f"3: {where}: its parent {parent.segment_index} does not stand before it"
            continue
        shared = trajectory.tokens[parent.segment_index].ids[: parent.length]
        if not np.array_equal(shared, trajectory.tokens[position].ids[: parent.length]):
            yield f"3: {where} differs from its parent before the fork at {parent.length}"
        if trajectory.tokens[position].sampled[: parent.length].any():
            yield f"3: {where}: tokens that it shares with its parent are marked as sampled again"


def _placement(trajectory: Trajectory) -> Iterator[str]:
    """Spans and dropped calls account for every sampled token once."""
    record = trajectory.record
    placed = [np.zeros(segment.length, np.uint8) for segment in record.segments]
    lengths: dict[int, int] = {}
    for span in record.call_spans:
        if span.segment_index >= len(placed) or span.start + span.length > len(placed[span.segment_index]):
            yield f"3: call {span.call_index}: its span lies outside segment {span.segment_index}"
            continue
        placed[span.segment_index][span.start : span.start + span.length] += 1
        if span.call_index in lengths:
            yield f"3: call {span.call_index} stands in two places"
        lengths[span.call_index] = span.length
    for drop in record.dropped:
        if drop.call_index in lengths:
            yield f"3: call {drop.call_index} is both placed and dropped"
        lengths[drop.call_index] = drop.length
        if not drop.reason:
            yield f"3: call {drop.call_index} was dropped without a reason"
    for index, (flags, tokens) in enumerate(zip(placed, trajectory.tokens, strict=True)):
        if not np.array_equal(flags, tokens.sampled):
            yield f"3: segment {index}: call spans do not cover exactly the sampled tokens"
    for call in record.calls:
        counted, found = call.usage.completion_counted, lengths.get(call.call_index, 0)
        if counted != found:
            yield f"3: call {call.call_index}: {counted} tokens were counted, {found} are accounted for"


def _policies(trajectory: Trajectory) -> Iterator[str]:
    """Each policy run says no other policy, and no other versions, than the call that it is part of."""
    calls = {call.call_index: call for call in trajectory.record.calls}
    spans: dict[int, list[CallSpan]] = defaultdict(list)
    for span in sorted(trajectory.record.call_spans, key=lambda span: span.start):
        spans[span.segment_index].append(span)
    for segment in trajectory.record.segments:
        own = spans[segment.segment_index]
        for run in segment.policy_runs:
            position = bisect_right(own, run.start, key=lambda span: span.start) - 1
            call = calls.get(own[position].call_index) if position >= 0 else None
            said = None if call is None else call.policy
            if said is None:
                continue  # spans and runs that do not match are named elsewhere
            same = (run.policy_name, run.lineage) == (said.policy_name, said.lineage)
            if not (same and said.version_low <= run.version_low <= run.version_high <= said.version_high):
                yield (
                    f"1: segment {segment.segment_index}: the policy run at {run.start} is of "
                    f"{run.policy_name}/{run.lineage}@{run.version_low}..{run.version_high}, its call of "
                    f"{said.policy_name}/{said.lineage}@{said.version_low}..{said.version_high}"
                )


def _against_journal(trajectory: Trajectory, calls: Sequence[RecordedCall]) -> Iterator[str]:
    spans = {span.call_index: span for span in trajectory.record.call_spans}
    dropped = {drop.call_index: drop.length for drop in trajectory.record.dropped}
    for recorded in calls:
        index, sampled = recorded.call.call_index, len(recorded.tokens.sampled_ids)
        span = spans.pop(index, None)
        if span is not None:
            yield from _same_ids(trajectory, span, recorded)
        elif dropped.pop(index, 0) != sampled:
            yield f"3: call {index}: its {sampled} sampled tokens are neither placed nor dropped"
    for index in (*spans, *dropped):
        yield f"3: call {index} is accounted for, but the journal does not know it"


def _same_ids(trajectory: Trajectory, span: CallSpan, recorded: RecordedCall) -> Iterator[str]:
    tokens, call = trajectory.tokens[span.segment_index], f"call {span.call_index}"
    end = span.start + span.length
    if not np.array_equal(tokens.ids[: span.start], recorded.tokens.prompt_ids):
        yield f"4: {call}: the context before its samples is not the prompt that the engine was given"
    if not np.array_equal(tokens.ids[span.start : end], recorded.tokens.sampled_ids):
        yield f"3: {call}: its span does not hold the ids that were sampled"
    if not np.array_equal(tokens.logprobs[span.start : end], recorded.tokens.logprobs):
        yield f"2: {call}: its log-probabilities are not those of the engine"


def _outcome(record: TrajectoryRecord) -> Iterator[str]:
    total = sum(segment.weight for segment in record.segments)
    if record.segments and abs(total - record.rollout_weight) > _WEIGHT_TOLERANCE:
        yield f"5: segment weights add up to {total:g}, the rollout weighs {record.rollout_weight:g}"
    if record.reward_valid and record.reward is None:
        yield "5: the reward is valid and absent"
    judged = record.verdict.reward if record.verdict is not None else None
    if judged is not None and record.reward is not None and judged != record.reward:
        yield f"5: reward {record.reward} is not the verdict's {judged}"
    if record.trainable == bool(record.not_trainable_because):
        yield "5: a rollout is trainable, or says why it is not"


def _shaped(trajectory: Trajectory) -> Iterator[str]:
    calls = {call.call_index: call for call in trajectory.record.calls}
    for span in trajectory.record.call_spans:
        call = calls.get(span.call_index)
        if call is None:
            yield f"3: call {span.call_index} has a span and no record"
            continue
        mask = trajectory.tokens[span.segment_index].loss_mask[span.start : span.start + span.length]
        reason = shaped_because(call)
        if mask.any() and reason is not None:
            yield f"6: call {span.call_index} is trained on, but has {reason}"


def shaped_because(call: Call) -> str | None:
    """Why the log-probabilities of `call` are not those of its sampling distribution; None if they are.

    A ratio of probabilities needs the distribution that the token was drawn from. Raw log-probabilities
    are that only where temperature, truncation and penalties changed nothing. No log-probability knows of
    a grammar.
    """
    if call.constraints:
        return f"sampling constrained by {', '.join(call.constraints)}"
    if call.logprob_kind is LogprobKind.SAMPLING:
        return None
    if call.logprob_kind is LogprobKind.RAW and call.sampling_effective.is_plain():
        return None
    if call.logprob_kind is LogprobKind.NONE:
        return "no log-probabilities"
    return "raw log-probabilities of a shaped sampling distribution (temperature, truncation or penalties)"
