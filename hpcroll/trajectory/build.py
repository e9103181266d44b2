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
    Parent,
    PolicyRun,
    RecordedCall,
    Segment,
    SegmentRole,
    SegmentStart,
    SegmentTokens,
)
from hpcroll.contract.invariants import shaped_because
from hpcroll.trajectory.asides import find_asides
from hpcroll.trajectory.layout import Piece, lay_out
from hpcroll.trajectory.roles import Lines
from hpcroll.trajectory.strands import Weaver, Woven
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
    policies: Collection[str] | None = None,
    rollout_weight: float = 1.0,
) -> Built:
    """The segments of one attempt's `calls`, in any order; they are related in order of `call_index`.

    A call whose prompt begins with another's prompt and samples goes on from it, in the same segment. Where
    several go on from one point, the line stays with the one whose conversation lasted longest, and the
    others fork: `branch`, or `retry` where their prompts are the same. A prompt that keeps only part of an
    earlier context forks at the deepest exact common point (`context_rewritten`, or `subagent` where that
    context lives on), any other begins a line of its own.

    The loss mask selects the samples of segments of `roles`, by one of `policies` (None: any), whose
    log-probabilities are those of the sampling distribution (any kind with `train_on_shaped_logprobs`),
    except those that a retry replaced and those that never reached the agent whole.
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
    asides = find_asides(weaver.calls)
    pieces = lay_out(weaver.calls, asides)
    lines = Lines(pieces, weaver.calls, asides)
    view = _View(
        lines,
        unused=_unused_retries(weaver.calls),
        shaped=train_on_shaped_logprobs,
        roles=frozenset(roles),
        policies=policies,
    )
    tokens = tuple(_arrays(piece, view) for piece in pieces)
    weights = shares(
        rollout_weight,
        [int(arrays.loss_mask.sum()) for arrays in tokens],
        [int(arrays.sampled.sum()) for arrays in tokens],
    )
    began = [lines.began(piece) for piece in pieces]
    rewritten = {
        piece.parent
        for piece, why in zip(pieces, began, strict=True)
        if why is SegmentStart.CONTEXT_REWRITTEN
    }
    return Built(
        segments=tuple(
            Segment(
                segment_index=piece.index,
                parent=_parent(piece),
                role=lines.role(piece),
                began=why,
                ended=view.ended(piece, rewritten=piece in rewritten),
                length=len(piece.ids),
                weight=weight,
                policy_runs=_policy_runs(piece),
                context_spans=piece.context_spans(),
            )
            for piece, why, weight in zip(pieces, began, weights, strict=True)
        ),
        tokens=tokens,
        call_spans=_call_spans(pieces),
        dropped=tuple(dropped),
        gaps=tuple(gaps),
        masked=view.masked(dropped),
    )


def _unplaceable(recorded: RecordedCall) -> str | None:
    """Why the samples of a call cannot stand in a segment, or None."""
    call, tokens = recorded.call, recorded.tokens
    shown = "" if call.error is None else f"; the agent never had the reply: {call.error}"
    if not tokens.prompt_length:
        return f"the engine returned no prompt ids{shown}"
    if len(tokens.logprobs) != len(tokens.sampled_ids):
        came, sampled = len(tokens.logprobs), len(tokens.sampled_ids)
        return f"{came} log-probabilities came for {sampled} sampled ids{shown}"
    missing = int(np.count_nonzero(~np.isfinite(tokens.logprobs)))
    if missing:
        return f"{missing} of {len(tokens.logprobs)} sampled ids have no finite log-probability{shown}"
    if call.policy is None:
        return f"no policy version was published, and the engine named none{shown}"
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


def _unused_retries(calls: Sequence[Woven]) -> set[Woven]:
    """Samples that a retry replaced and that no later context builds on.

    Where no later context tells, the agent went on with the last of those that it got whole.
    """
    built_on = {woven.above for woven in calls}
    for woven in calls:
        for source, common in ((woven.base, woven.common), (woven.near, woven.near_common)):
            if source is not None and woven.twin is None and common > source.start:
                built_on.add(source)
    groups: dict[Woven, list[Woven]] = {}
    for woven in calls:
        if woven.twin is not None:
            groups.setdefault(woven.twin, [woven.twin]).append(woven)
    unused: set[Woven] = set()
    for siblings in groups.values():
        whole = [woven for woven in siblings if not woven.aborted] or siblings
        kept = [woven for woven in whole if woven in built_on] or whole[-1:]
        unused.update(woven for woven in siblings if woven not in kept)
    return unused


class _View:
    """What is trained on, and why the rest is not."""

    def __init__(
        self,
        lines: Lines,
        *,
        unused: Collection[Woven],
        shaped: bool,
        roles: Collection[SegmentRole],
        policies: Collection[str] | None,
    ) -> None:
        self._lines = lines
        self._unused = unused
        self._shaped = shaped
        self._roles = roles
        self._policies = policies
        self._why: Counter[str] = Counter()

    def trains_on(self, piece: Piece, woven: Woven) -> bool:
        """Whether the view trains on this call's samples; counts the reason where it does not."""
        reason = self._reason(piece, woven)
        if reason is not None:
            self._why[reason] += woven.length
        return reason is None

    def ended(self, piece: Piece, *, rewritten: bool) -> str:
        """Why a piece ended: what took over, else the last call's finish reason."""
        last = piece.calls[-1]
        if last in self._unused:
            return SegmentStart.RETRY
        if rewritten:
            return SegmentStart.CONTEXT_REWRITTEN
        return "aborted" if last.aborted else last.recorded.call.finish_reason or ""

    def masked(self, dropped: Sequence[Dropped]) -> tuple[str, ...]:
        """One line per reason."""
        why = self._why.copy()
        for drop in dropped:
            why[f"dropped, {drop.reason}"] += drop.length
        return tuple(f"{count} sampled tokens: {reason}" for reason, count in sorted(why.items()))

    def _reason(self, piece: Piece, woven: Woven) -> str | None:
        call, role = woven.recorded.call, self._lines.role(piece)
        if call.error is not None:
            return f"the agent never had the reply whole: {call.error}"
        if role not in self._roles:
            return f"in a segment of role {role}"
        if woven in self._unused:
            return "replaced by a retry, so the outcome says nothing about them"
        assert call.policy is not None, "calls without a policy are dropped"
        if self._policies is not None and call.policy.policy_name not in self._policies:
            return f"sampled by policy {call.policy.policy_name}, which is not the one that is trained"
        return None if self._shaped else shaped_because(call)


def _parent(piece: Piece) -> Parent | None:
    if piece.parent is None:
        return None
    return Parent(segment_index=piece.parent.index, length=piece.parent_length)


def _arrays(piece: Piece, view: _View) -> SegmentTokens:
    ids = piece.ids
    sampled: Flags = np.zeros(len(ids), np.uint8)
    loss_mask: Flags = np.zeros(len(ids), np.uint8)
    logprobs: Floats = np.full(len(ids), np.nan, np.float32)
    for woven in piece.calls:
        span = slice(woven.start, woven.end)
        sampled[span] = 1
        loss_mask[span] = view.trains_on(piece, woven)
        logprobs[span] = woven.recorded.tokens.logprobs
    return SegmentTokens(np.ascontiguousarray(ids, np.uint32), sampled, loss_mask, logprobs)


def _policy_runs(piece: Piece) -> tuple[PolicyRun, ...]:
    """One run per call, or one per version where the engine said which sampled what."""
    runs = []
    for woven in piece.calls:
        policy = woven.recorded.call.policy
        assert policy is not None, "calls without a policy are dropped"
        named = {"policy_name": policy.policy_name, "lineage": policy.lineage}
        spans = woven.recorded.call.version_spans
        ends = [0, *(span.start + span.length for span in spans)]
        # Of a reply that was cut off, the engine may not have named the last version.
        if spans and ends == [*(span.start for span in spans), woven.length]:
            runs += [
                PolicyRun(
                    start=woven.start + span.start,
                    length=span.length,
                    version_low=span.version,
                    version_high=span.version,
                    **named,
                )
                for span in spans
            ]
        else:
            runs.append(PolicyRun(start=woven.start, length=woven.length, **policy.model_dump()))
    return tuple(runs)


def _call_spans(pieces: Sequence[Piece]) -> tuple[CallSpan, ...]:
    spans = [
        CallSpan(
            call_index=woven.call_index, segment_index=piece.index, start=woven.start, length=woven.length
        )
        for piece in pieces
        for woven in piece.calls
    ]
    return tuple(sorted(spans, key=lambda span: span.call_index))
