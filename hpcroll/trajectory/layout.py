"""How woven calls lie in pieces, each of which becomes a segment.

Calls form a tree: each goes on from the one whose sequence its prompt begins with. Where several go on
from the same point, the one whose conversation lasted longest stays in the piece, so that the agent's
line is one piece; the others begin pieces of their own at the deepest token that they share with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hpcroll.contract import ContextSpan, Ids, SpanRole
from hpcroll.trajectory.sequences import common_length
from hpcroll.trajectory.strands import Woven

_Span = tuple[int, int, SpanRole]
"""Tokens [start, stop) and whose words they are."""


@dataclass(slots=True, eq=False)
class Piece:
    """Calls that go on from each other, on one token sequence."""

    calls: list[Woven]
    beside: bool
    """Others went on from where it begins, and they hold the line."""
    index: int = -1
    parent: Piece | None = None
    parent_length: int = 0
    inherited: tuple[_Span, ...] = ()

    @property
    def head(self) -> Woven:
        return self.calls[0]

    @property
    def ids(self) -> Ids:
        return self.calls[-1].sequence

    def context_spans(self) -> tuple[ContextSpan, ...]:
        """The spans that no call in this piece sampled, inherited roles kept."""
        return tuple(
            ContextSpan(start=start, length=stop - start, role=role) for start, stop, role in self._spans()
        )

    def inheritance(self, length: int) -> tuple[_Span, ...]:
        """The first `length` tokens as a fork sees them: what was sampled are the assistant's words."""
        return self._spans(length)

    def _spans(self, until: int | None = None) -> tuple[_Span, ...]:
        end = self.calls[-1].end if until is None else until
        spans = list(self.inherited)
        position = self.parent_length
        for woven in self.calls:
            spans.append((position, woven.start, SpanRole.UNKNOWN))
            position = woven.end
            if until is not None:
                spans.append((woven.start, position, SpanRole.ASSISTANT))
        return _joined([(start, min(stop, end), role) for start, stop, role in spans])


def lay_out(calls: Sequence[Woven], asides: Collection[Woven]) -> list[Piece]:
    """The pieces of all `calls`, parents before their forks, else in order of their first calls.

    `asides` are calls that no line goes on from, whatever their prompts say.
    """
    return _Layout(calls, asides).pieces


@dataclass(slots=True)
class _Layout:
    calls: Sequence[Woven]
    asides: Collection[Woven]
    pieces: list[Piece] = field(default_factory=list)
    _piece_of: dict[Woven, Piece] = field(default_factory=dict)
    _winners: dict[Woven, Woven] = field(default_factory=dict)
    """For each call, who holds the line at the point where it begins."""

    def __post_init__(self) -> None:
        self._hold_contests()
        for woven in self.calls:
            wins = self._winners.get(woven) is woven
            if wins and woven.above is not None:
                piece = self._piece_of[woven.above]
                piece.calls.append(woven)
            else:
                piece = Piece([woven], beside=not wins)
            self._piece_of[woven] = piece
        for woven in self.calls:
            self._emit(self._piece_of[woven])

    def _hold_contests(self) -> None:
        last = last_heirs(self.calls)
        rivals: dict[tuple[Woven | None, Woven | None], list[Woven]] = defaultdict(list)
        for woven in self.calls:
            # They begin after the same call, or are a first call and its repetitions.
            point = (woven.above, None) if woven.above is not None else (None, woven.twin or woven)
            rivals[point].append(woven)
        for group in rivals.values():
            able = group if group[0].above is None else [w for w in group if w not in self.asides]
            if able:
                winner = max(
                    able, key=lambda woven: (woven not in self.asides, not woven.aborted, last[woven])
                )
                self._winners.update(dict.fromkeys(group, winner))

    def _emit(self, piece: Piece) -> None:
        if piece.index >= 0:
            return
        parent, length = self._fork_point(piece)
        if parent is not None:
            self._emit(parent)
            piece.parent, piece.parent_length = parent, length
            piece.inherited = parent.inheritance(length)
        piece.index = len(self.pieces)
        self.pieces.append(piece)

    def _fork_point(self, piece: Piece) -> tuple[Piece | None, int]:
        head = piece.head
        if piece.beside:
            trunk = self._piece_of[head.above or self._winners[head]]
            known = 0 if head.above is None else head.above.end
        elif head.base is None:
            return None, 0
        else:
            trunk, known = self._piece_of[head.base], head.common
        prompt = head.sequence[: head.start]
        # The trunk may hold calls that began later, and share more.
        shared = known + common_length(trunk.ids[known:], prompt[known:])
        if piece.beside and head.near is not None and head.near_common > shared:
            return self._piece_of[head.near], head.near_common
        return trunk, shared


def last_heirs(calls: Sequence[Woven]) -> dict[Woven, int]:
    """The latest call that goes on from each, directly or not, itself included."""
    last = {woven: woven.call_index for woven in calls}
    for woven in reversed(calls):
        source = woven.above or woven.base
        if source is not None and source.purpose is woven.purpose:
            last[source] = max(last[source], last[woven])
    return last


def _joined(spans: Sequence[_Span]) -> tuple[_Span, ...]:
    """`spans` without empty ones, neighbours of one role made one."""
    joined: list[_Span] = []
    for start, stop, role in spans:
        if stop <= start:
            continue
        if joined and joined[-1][1] == start and joined[-1][2] == role:
            start = joined.pop()[0]
        joined.append((start, stop, role))
    return tuple(joined)
