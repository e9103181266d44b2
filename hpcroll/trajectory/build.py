"""From recorded model calls to segments: every sampled token lands in one segment, or is named as dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hpcroll.contract import (
    CallSpan,
    Dropped,
    Flags,
    Floats,
    PolicyRun,
    RecordedCall,
    Segment,
    SegmentRole,
    SegmentStart,
    SegmentTokens,
)
from hpcroll.contract.invariants import shaped_because
from hpcroll.trajectory.strands import Strand, Weaver
from hpcroll.trajectory.weights import shares


@dataclass(frozen=True, slots=True)
class Built:
    """What a rollout's calls amount to.

    `tokens[i]` are the arrays of `segments[i]`. `dropped`: sampled tokens that stand in no segment, each
    with its reason. `gaps`: what is known to be missing. `masked`: why sampled tokens are not trained on,
    one line per reason; empty where all are.
    """

    segments: tuple[Segment, ...]
    tokens: tuple[SegmentTokens, ...]
    call_spans: tuple[CallSpan, ...]
    dropped: tuple[Dropped, ...]
    gaps: tuple[str, ...]
    masked: tuple[str, ...]

    @property
    def trained_tokens(self) -> int:
        """How many tokens the loss mask selects."""
        return sum(int(tokens.loss_mask.sum()) for tokens in self.tokens)


def build(
    calls: Sequence[RecordedCall],
    *,
    train_on_shaped_logprobs: bool = False,
    roles: Collection[SegmentRole] = (SegmentRole.MAIN,),
    rollout_weight: float = 1.0,
) -> Built:
    """The segments of one attempt's `calls`, in any order; they are laid in order of `call_index`.

    A call whose prompt begins with all tokens of a segment continues it, the longest wins. Otherwise a
    new segment forks at the deepest exact common point (`context_rewritten`), stands beside the call
    with the very same prompt (`retry`), or begins a line of its own. The dialogue that began first is the
    `main` line; one that was declared auxiliary or never went on is `auxiliary`, others are `subagent`.

    The loss mask selects the samples of segments of `roles` whose log-probabilities are those of the
    sampling distribution (any kind with `train_on_shaped_logprobs`), except those that a retry replaced.
    """
    weaver = Weaver()
    dropped: list[Dropped] = []
    gaps: list[str] = []
    for recorded in sorted(calls, key=lambda item: item.call.call_index):
        reason = _unplaceable(recorded)
        sampled = len(recorded.tokens.sampled_ids)
        if reason is not None and sampled:
            dropped.append(Dropped(call_index=recorded.call.call_index, length=sampled, reason=reason))
        elif sampled:
            weaver.place(recorded)
        elif gap := _gap(recorded):
            gaps.append(gap)
    masks = _Masks(weaver, train_on_shaped_logprobs, frozenset(roles))
    tokens = tuple(_arrays(strand, masks) for strand in weaver.strands)
    weights = shares(
        rollout_weight,
        [int(arrays.loss_mask.sum()) for arrays in tokens],
        [int(arrays.sampled.sum()) for arrays in tokens],
    )
    return Built(
        segments=tuple(
            _segment(strand, weaver, masks, weight)
            for strand, weight in zip(weaver.strands, weights, strict=True)
        ),
        tokens=tokens,
        call_spans=_call_spans(weaver.strands),
        dropped=tuple(dropped),
        gaps=tuple(gaps),
        masked=masks.reasons(dropped),
    )


def _unplaceable(recorded: RecordedCall) -> str | None:
    """Why the samples of a call cannot stand in a segment, or None."""
    call, tokens = recorded.call, recorded.tokens
    if call.error is not None:
        return f"never shown to the agent: {call.error}"
    if not len(tokens.prompt_ids):
        return "the engine returned no prompt ids"
    if len(tokens.logprobs) != len(tokens.sampled_ids):
        return f"{len(tokens.logprobs)} log-probabilities came for {len(tokens.sampled_ids)} sampled ids"
    missing = int(np.count_nonzero(~np.isfinite(tokens.logprobs)))
    if missing:
        return f"{missing} of {len(tokens.logprobs)} sampled ids have no finite log-probability"
    if call.policy is None:
        return "no policy version was published, and the engine named none"
    return None


def _gap(recorded: RecordedCall) -> str | None:
    """What is missing from a call without sampled ids, or None where nothing was sampled."""
    call = recorded.call
    if call.error is not None:
        return f"call {call.call_index} gave no reply: {call.error}"
    if call.usage.completion_reported:
        return (
            f"call {call.call_index}: the engine reports {call.usage.completion_reported} sampled tokens "
            "and returned no ids"
        )
    return None if call.reply is None else f"call {call.call_index}: the reply came without token ids"


class _Masks:
    """Roles of lines, and why a call is not trained on."""

    def __init__(self, weaver: Weaver, shaped: bool, roles: frozenset[SegmentRole]) -> None:
        self._roles = _line_roles(weaver.strands)
        self._unused = weaver.unused_retries()
        self._shaped = shaped
        self._trained_roles = roles
        self._why: Counter[str] = Counter()

    def role(self, strand: Strand) -> SegmentRole:
        return self._roles[strand.family]

    def trains_on(self, strand: Strand, recorded: RecordedCall) -> bool:
        """Whether the view trains on this call's samples; counts the reason where it does not."""
        reason = self._reason(strand, recorded)
        if reason is not None:
            self._why[reason] += len(recorded.tokens.sampled_ids)
        return reason is None

    def _reason(self, strand: Strand, recorded: RecordedCall) -> str | None:
        role = self.role(strand)
        if role not in self._trained_roles:
            return f"in a segment of role {role}"
        if self.is_unused(recorded):
            return "replaced by a retry, so the outcome says nothing about them"
        return None if self._shaped else shaped_because(recorded.call)

    def is_unused(self, recorded: RecordedCall) -> bool:
        return recorded.call.call_index in self._unused

    def reasons(self, dropped: Sequence[Dropped]) -> tuple[str, ...]:
        why = self._why.copy()
        for drop in dropped:
            why[f"dropped, {drop.reason}"] += drop.length
        return tuple(f"{count} sampled tokens: {reason}" for reason, count in sorted(why.items()))


def _line_roles(strands: Sequence[Strand]) -> dict[int, SegmentRole]:
    """The role of each line (a first strand and its forks), by declaration, else by shape."""
    declared = {strand.family for strand in strands if strand.auxiliary}
    dialogues = {
        strand.family
        for strand in strands
        if len(strand.placed) > 1 or strand.began is SegmentStart.CONTEXT_REWRITTEN
    }
    main = _main_line([strand for strand in strands if strand.family not in declared], dialogues)
    roles = {}
    for family in {strand.family for strand in strands}:
        if family == main:
            roles[family] = SegmentRole.MAIN
        elif family in declared or family not in dialogues:
            roles[family] = SegmentRole.AUXILIARY  # a title, a summary: asked once, never gone on from
        else:
            roles[family] = SegmentRole.SUBAGENT
    return roles


def _main_line(strands: Sequence[Strand], dialogues: Collection[int]) -> int | None:
    """The dialogue that began first, since a subagent begins after the agent that asks for it.

    Not the one with the most calls: an agent may leave most of the work to a subagent. Without any
    dialogue, the longest line.
    """
    for strand in strands:
        if strand.family in dialogues:
            return strand.family
    longest = max(strands, key=lambda strand: (len(strand.ids), -strand.index), default=None)
    return None if longest is None else longest.family


def _arrays(strand: Strand, masks: _Masks) -> SegmentTokens:
    size = len(strand.ids)
    sampled: Flags = np.zeros(size, np.uint8)
    loss_mask: Flags = np.zeros(size, np.uint8)
    logprobs: Floats = np.full(size, np.nan, np.float32)
    for placed in strand.placed:
        span = slice(placed.start, placed.start + placed.length)
        sampled[span] = 1
        loss_mask[span] = masks.trains_on(strand, placed.recorded)
        logprobs[span] = placed.recorded.tokens.logprobs
    return SegmentTokens(np.ascontiguousarray(strand.ids, np.uint32), sampled, loss_mask, logprobs)


def _segment(strand: Strand, weaver: Weaver, masks: _Masks, weight: float) -> Segment:
    role = masks.role(strand)
    began = strand.began
    if role is SegmentRole.MAIN and strand.index == strand.family:
        began = SegmentStart.START  # the main line may begin after an auxiliary call, and is no subagent
    return Segment(
        segment_index=strand.index,
        parent=strand.parent,
        role=role,
        began=began,
        ended=_ended(strand, weaver, masks),
        length=len(strand.ids),
        weight=weight,
        policy_runs=_policy_runs(strand),
        context_spans=strand.context_spans(),
    )


def _ended(strand: Strand, weaver: Weaver, masks: _Masks) -> str:
    """`retry`, `context_rewritten`, or the finish reason of the last call where nothing took over."""
    last = strand.placed[-1].recorded
    if masks.is_unused(last):
        return SegmentStart.RETRY
    forks = [s for s in weaver.strands if s.parent and s.parent.segment_index == strand.index]
    if any(fork.began is SegmentStart.CONTEXT_REWRITTEN for fork in forks):
        return SegmentStart.CONTEXT_REWRITTEN
    return last.call.finish_reason or ""


def _policy_runs(strand: Strand) -> tuple[PolicyRun, ...]:
    runs = []
    for placed in strand.placed:
        policy = placed.recorded.call.policy
        assert policy is not None, "calls without a policy are dropped"
        runs.append(PolicyRun(start=placed.start, length=placed.length, **policy.model_dump()))
    return tuple(runs)


def _call_spans(strands: Sequence[Strand]) -> tuple[CallSpan, ...]:
    spans = [
        CallSpan(
            call_index=placed.call_index,
            segment_index=strand.index,
            start=placed.start,
            length=placed.length,
        )
        for strand in strands
        for placed in strand.placed
    ]
    return tuple(sorted(spans, key=lambda span: span.call_index))
