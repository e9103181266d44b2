"""Strands: what each call's prompt goes on from, found by comparing token ids.

A strand is a token sequence that grows while calls are laid onto its end; a call that goes on from
anywhere else begins a strand of its own. Strands only serve to find relations fast: how calls become
segments is decided once all relations are known (`layout`). Only ids are compared, never text, because
decoding and encoding again changes ids.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import xxhash

from hpcroll.contract import CallPurpose, CallTokens, Ids, RecordedCall
from hpcroll.trajectory.sequences import common_length


@dataclass(slots=True, eq=False)
class Woven:
    """A call and its relations to earlier ones: its prompt is [0, start) of its sequence, its samples
    [start, end)."""

    recorded: RecordedCall
    strand: Strand
    start: int
    end: int
    above: Woven | None = None
    """The call of the same purpose whose whole sequence the prompt begins with: this one goes on from it."""
    base: Woven | None = None
    """Without `above`: the earlier call of the same conversation that it shares most with; None: a line of
    its own begins."""
    common: int = 0
    """How many leading tokens of the prompt `base` has, too."""
    keeps_prompt: bool = False
    """`base`'s whole prompt stands unchanged at the beginning: only what came after it was rewritten."""
    is_exact: bool = False
    """Some earlier call's whole sequence stands unchanged at the beginning, up to `common`."""
    near: Woven | None = None
    """The earlier call that it shares most with, whatever the relation."""
    near_common: int = 0
    twin: Woven | None = None
    """The first call with the very same prompt, where this one is a later one."""

    @property
    def call_index(self) -> int:
        return self.recorded.call.call_index

    @property
    def purpose(self) -> CallPurpose:
        return self.recorded.call.purpose

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def aborted(self) -> bool:
        """Its reply never reached the agent whole."""
        return self.recorded.call.error is not None

    @property
    def sequence(self) -> Ids:
        """Prompt and samples: a view."""
        return self.strand.ids[: self.end]


@dataclass(slots=True, eq=False)
class Strand:
    """One token sequence and the calls on it; it shares its first `fork` tokens with strand `parent`."""

    index: int
    purpose: CallPurpose
    parent: int | None
    fork: int
    ids: Ids
    calls: list[Woven] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def last_whole(self, common: int) -> Woven | None:
        """The last call whose whole sequence lies within the first `common` tokens."""
        position = bisect_right(self.ends, common)
        return self.calls[position - 1] if position else None

    def last_asked(self, common: int) -> Woven | None:
        """The last call whose prompt lies within the first `common` tokens and whose agent got the reply."""
        asked = self.calls[: bisect_right(self.starts, common)]
        return next((woven for woven in reversed(asked) if not woven.aborted), None)

    def covering(self, common: int) -> Woven:
        """The first call whose sequence holds the first `common` tokens."""
        return next(woven for woven in self.calls if woven.end >= common)


class Weaver:
    """Finds the relations of calls, given in order of their start."""

    def __init__(self) -> None:
        self.calls: list[Woven] = []
        self._strands: list[Strand] = []
        self._first_with: dict[tuple[CallPurpose, bytes], Woven] = {}
        self._by_tokens: dict[int, Woven] = {}

    def place(self, recorded: RecordedCall) -> Woven:
        """Relates the call to those before it; it must have a prompt and samples."""
        prompt = self._prompt(recorded.tokens)
        purpose = recorded.call.purpose
        commons = self._commons(prompt)
        twin = self._first_with.get((purpose, _digest(prompt)))
        above = twin.above if twin is not None else self._above(commons, purpose)
        strand = self._strand(recorded, prompt, commons, above if twin is None else None)
        woven = Woven(recorded, strand, len(prompt), len(strand.ids), above=above, twin=twin)
        if twin is not None:
            woven.base, woven.common = twin.base, twin.common
            woven.keeps_prompt, woven.is_exact = twin.keeps_prompt, twin.is_exact
            woven.near, woven.near_common = twin, len(prompt)
        else:
            self._relate(woven, prompt, commons)
            self._first_with[purpose, _digest(prompt)] = woven
        strand.calls.append(woven)
        strand.ends.append(woven.end)
        strand.starts.append(woven.start)
        self._by_tokens[id(recorded.tokens)] = woven
        self.calls.append(woven)
        return woven

    def _prompt(self, tokens: CallTokens) -> Ids:
        folded = tokens.folded
        return tokens.prompt_ids if folded is None else folded.unfold(self._known)

    def _known(self, tokens: CallTokens) -> Ids | None:
        woven = self._by_tokens.get(id(tokens))
        return None if woven is None else woven.sequence

    def _commons(self, prompt: Ids) -> list[int]:
        """How much each strand shares with `prompt`; tokens that two strands share are compared once."""
        commons: list[int] = []
        for strand in self._strands:
            shared = 0 if strand.parent is None else commons[strand.parent]
            if shared >= strand.fork:
                shared = strand.fork + common_length(strand.ids[strand.fork :], prompt[strand.fork :])
            commons.append(shared)
        return commons

    def _above(self, commons: list[int], purpose: CallPurpose) -> Woven | None:
        """The longest whole sequence of this purpose that the prompt begins with, the latest of equals.

        None where it also begins with a longer earlier prompt: then that call's reply was rewritten.
        """
        kin = [(s, common) for s, common in zip(self._strands, commons, strict=True) if s.purpose is purpose]
        whole = [woven for s, common in kin if (woven := s.last_whole(common)) is not None]
        above = max(whole, key=lambda woven: (woven.end, woven.call_index), default=None)
        end = 0 if above is None else above.end
        asked = (s.last_asked(common) for s, common in kin)
        return None if any(woven is not None and woven.start > end for woven in asked) else above

    def _relate(self, woven: Woven, prompt: Ids, commons: list[int]) -> None:
        pairs = list(zip(self._strands, commons, strict=False))  # its own new strand has no common yet
        # The lowest index of equals: there the shared tokens stand first.
        closest, common = max(pairs, key=lambda pair: (pair[1], -pair[0].index), default=(None, 0))
        if closest is not None and common:
            woven.near, woven.near_common = closest.covering(common), common
        if woven.above is not None:
            return
        # What was declared as the agent's own work never builds on a side question.
        own = woven.purpose is CallPurpose.MAIN
        kin = [
            (strand, common)
            for strand, common in pairs
            if (not own or strand.purpose is CallPurpose.MAIN) and _is_related(strand, prompt, common)
        ]
        if kin:
            strand, woven.common = max(kin, key=lambda pair: (pair[1], -pair[0].index))
            woven.base = strand.covering(woven.common)
            woven.keeps_prompt = woven.common >= woven.base.start
            asked = strand.last_asked(woven.common)
            whole = strand.last_whole(woven.common)
            woven.is_exact = whole is not None and (asked is None or asked.start <= whole.end)

    def _strand(self, recorded: RecordedCall, prompt: Ids, commons: list[int], above: Woven | None) -> Strand:
        ids = np.concatenate([prompt, recorded.tokens.sampled_ids])
        if above is not None and above is above.strand.calls[-1]:
            above.strand.ids = ids
            return above.strand
        fork = max(commons, default=0)
        parent = commons.index(fork) if fork else None
        strand = Strand(len(self._strands), recorded.call.purpose, parent, fork, ids)
        self._strands.append(strand)
        return strand


def _digest(prompt: Ids) -> bytes:
    # 128 bits stand for the prompt: keeping every prompt grows with the square of the turns.
    return xxhash.xxh3_128_digest(prompt.data)


def _is_related(strand: Strand, prompt: Ids, common: int) -> bool:
    """True where `prompt` is the same conversation with its past changed.

    Sure where a whole earlier prompt of the strand stands unchanged; where history before it was
    compacted, by shape: more than half of the shorter of the two first prompts is shared. Two agents
    that share only a template's opening stay apart.
    """
    first = strand.starts[0]
    return common >= first or 2 * common > min(first, len(prompt))
