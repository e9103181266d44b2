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


@dataclass(slots=True, eq=False)
class Piece:
    """Calls that go on from each other, on one token sequence."""

    calls: list[Woven]
    beside: bool
    """Others went on from where it begins, and they hold the line."""
    index: int = -1
    parent: Piece | None = None
    parent_length: int = 0
    inherited: tuple[ContextSpan, ...] = ()

    @property
    def head(self) -> Woven:
        return self.calls[0]

    @property
    def ids(self) -> Ids:
        return self.calls[-1].sequence

    def context_spans(self, until: int | None = None) -> tuple[ContextSpan, ...]:
        """The spans of [0, until) that no call in this piece sampled, inherited roles kept.

        With `until`, what this piece sampled before it counts as the assistant's words: so a fork sees it.
        """
        end = self.calls[-1].end if until is None else until
        spans = [(span.start, span.start + span.length, span.role) for span in self.inherited]
        position = sum(span.length for span in self.inherited)
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
            piece.inherited = parent.context_spans(until=length)
        piece.index = len(self.pieces)
        self.pieces.append(piece)

    def _fork_point(self, piece: Piece) -> tuple[Piece | None, int]:
        head = piece.head
        if not piece.beside:
            return (None, 0) if head.base is None else (self._piece_of[head.base], head.common)
        trunk = self._piece_of[head.above or self._winners[head]]
        known = 0 if head.above is None else head.above.end
        prompt = head.sequence[: head.start]
        shared = known + common_length(trunk.ids[known:], prompt[known:])
        if head.near is not None and head.near_common > shared:
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


def _joined(spans: list[tuple[int, int, SpanRole]]) -> tuple[ContextSpan, ...]:
    joined: list[tuple[int, int, SpanRole]] = []
    for start, stop, role in spans:
        if stop <= start:
            continue
        if joined and joined[-1][1] == start and joined[-1][2] == role:
            start = joined.pop()[0]
        joined.append((start, stop, role))
    return tuple(ContextSpan(start=start, length=stop - start, role=role) for start, stop, role in joined)
