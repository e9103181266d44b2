"""Strands: token sequences that grow while calls are laid onto them, and where a call belongs.

A strand becomes a segment of the trajectory. Placing follows the order in which calls started; it looks
at token ids only, never at text, because decoding and encoding again changes ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xxhash

from hpcroll.contract import (
    CallPurpose,
    ContextSpan,
    Ids,
    Parent,
    RecordedCall,
    SegmentStart,
    SpanRole,
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A call on a strand: its samples are the strand's tokens [start, start + length)."""

    recorded: RecordedCall
    start: int

    @property
    def length(self) -> int:
        return len(self.recorded.tokens.sampled_ids)

    @property
    def call_index(self) -> int:
        return self.recorded.call.call_index


@dataclass(slots=True)
class Strand:
    """One unbroken token sequence. `family` is the index of the strand that its line began with."""

    index: int
    family: int
    auxiliary: bool
    began: SegmentStart
    parent: Parent | None
    ids: Ids
    inherited: tuple[ContextSpan, ...] = ()
    placed: list[Placed] = field(default_factory=list)

    @property
    def first_prompt_length(self) -> int:
        return self.placed[0].start

    def extend(self, recorded: RecordedCall) -> None:
        """Lays `recorded` on the end; its prompt must begin with all tokens of this strand."""
        prompt = recorded.tokens.prompt_ids
        self.placed.append(Placed(recorded, len(prompt)))
        self.ids = np.concatenate([prompt, recorded.tokens.sampled_ids])

    def is_prefix_of(self, prompt: Ids) -> bool:
        size = len(self.ids)
        if size > len(prompt) or self.ids[-1] != prompt[size - 1]:
            return False  # the last token differs for nearly every stranger: cheap to ask first
        return bool(np.array_equal(self.ids, prompt[:size]))

    def common_with(self, prompt: Ids) -> int:
        """Length of the longest common prefix with `prompt`."""
        size = min(len(self.ids), len(prompt))
        differs = np.flatnonzero(self.ids[:size] != prompt[:size])
        return int(differs[0]) if len(differs) else size

    def context_spans(self, until: int | None = None) -> tuple[ContextSpan, ...]:
        """The spans of [0, until) that no call on this strand sampled, inherited roles kept.

        With `until`, what this strand sampled before it counts as the assistant's words: so a fork
        sees it.
        """
        end = len(self.ids) if until is None else until
        inherited_end = sum(span.length for span in self.inherited)
        spans: list[tuple[int, int, SpanRole]] = [
            (span.start, span.start + span.length, span.role) for span in self.inherited
        ]
        position = inherited_end
        for placed in self.placed:
            spans.append((position, placed.start, SpanRole.UNKNOWN))
            position = placed.start + placed.length
            if until is not None:
                spans.append((placed.start, position, SpanRole.ASSISTANT))
        spans.append((position, end, SpanRole.UNKNOWN))
        return _joined([(start, min(stop, end), role) for start, stop, role in spans])


def _joined(spans: list[tuple[int, int, SpanRole]]) -> tuple[ContextSpan, ...]:
    joined: list[tuple[int, int, SpanRole]] = []
    for start, stop, role in spans:
        if stop <= start:
            continue
        if joined and joined[-1][1] == start and joined[-1][2] == role:
            start = joined.pop()[0]
        joined.append((start, stop, role))
    return tuple(ContextSpan(start=start, length=stop - start, role=role) for start, stop, role in joined)


class Weaver:
    """Lays calls onto strands, in the order of their start; every call it is given is placed."""

    def __init__(self) -> None:
        self.strands: list[Strand] = []
        self.retried: list[list[tuple[Strand, Placed]]] = []
        """Calls that shared one prompt, in order."""
        self._same_prompt: dict[tuple[bool, bytes], list[tuple[Strand, Placed]]] = {}

    def place(self, recorded: RecordedCall) -> None:
        """Continues a strand, forks one, or begins one; the call's tokens then stand in one strand."""
        prompt = recorded.tokens.prompt_ids
        auxiliary = recorded.call.purpose is CallPurpose.AUXILIARY
        siblings = self._same_prompt.setdefault((auxiliary, _digest(prompt)), [])
        if siblings:
            strand = self._fork(siblings[0][0], len(prompt), SegmentStart.RETRY, auxiliary)
        else:
            strand = self._continued(prompt, auxiliary) or self._begun(prompt, auxiliary)
        strand.extend(recorded)
        siblings.append((strand, strand.placed[-1]))
        if len(siblings) == 2:
            self.retried.append(siblings)

    def _continued(self, prompt: Ids, auxiliary: bool) -> Strand | None:
        """The longest strand that is a prefix of `prompt`; the latest of equals.

        A declared auxiliary call never lengthens the main line: the agent does not go on from it.
        """
        able = [s for s in self.strands if s.auxiliary == auxiliary and s.is_prefix_of(prompt)]
        return max(able, key=lambda strand: (len(strand.ids), strand.index), default=None)

    def _begun(self, prompt: Ids, auxiliary: bool) -> Strand:
        """A new strand for `prompt`: a fork at the deepest common point, or a line of its own."""
        commons = [(strand.common_with(prompt), strand) for strand in self.strands]
        related = [
            (common, strand)
            for common, strand in commons
            if strand.auxiliary == auxiliary and _is_rewrite(strand, prompt, common)
        ]
        if related:
            # The lowest index of equals: there the shared tokens stand first.
            common, strand = max(related, key=lambda pair: (pair[0], -pair[1].index))
            return self._fork(strand, common, SegmentStart.CONTEXT_REWRITTEN, auxiliary)
        began = SegmentStart.SUBAGENT if self.strands else SegmentStart.START
        strand = Strand(len(self.strands), len(self.strands), auxiliary, began, None, prompt[:0])
        self.strands.append(strand)
        return strand

    def _fork(self, source: Strand, length: int, began: SegmentStart, auxiliary: bool) -> Strand:
        strand = Strand(
            index=len(self.strands),
            family=source.family,
            auxiliary=auxiliary,
            began=began,
            parent=Parent(segment_index=source.index, length=length),
            ids=source.ids[:length],
            inherited=source.context_spans(until=length),
        )
        self.strands.append(strand)
        return strand

    def unused_retries(self) -> set[int]:
        """`call_index` of samples that a retry replaced and that no later context builds on.

        Where no later context tells, the agent went on with the last of them.
        """
        unused: set[int] = set()
        for siblings in self.retried:
            used = [placed.call_index for strand, placed in siblings if self._is_built_on(strand, placed)]
            kept = used or [siblings[-1][1].call_index]
            unused.update(placed.call_index for _, placed in siblings if placed.call_index not in kept)
        return unused

    def _is_built_on(self, strand: Strand, placed: Placed) -> bool:
        if strand.placed[-1].start > placed.start:
            return True
        return any(
            other.parent is not None
            and other.parent.segment_index == strand.index
            and other.parent.length > placed.start
            for other in self.strands
        )


def _digest(prompt: Ids) -> bytes:
    # 128 bits stand for the prompt: keeping every prompt grows with the square of the turns.
    return xxhash.xxh3_128_digest(prompt.tobytes())


def _is_rewrite(strand: Strand, prompt: Ids, common: int) -> bool:
    """True where `prompt` is the same conversation with its past changed.

    Sure where a whole earlier prompt of the strand stands unchanged; where history before it was
    compacted, by shape: more than half of the shorter of the two first prompts is shared. Two agents
    that share only a template's opening stay apart.
    """
    first = strand.first_prompt_length
    return common >= first or 2 * common > min(first, len(prompt))
