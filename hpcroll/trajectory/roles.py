"""Roles: which piece is the agent's own line, which a subagent's, which a question on the side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from hpcroll.contract import CallPurpose, SegmentRole, SegmentStart
from hpcroll.trajectory.layout import Piece
from hpcroll.trajectory.strands import Woven

_DECLARED = {CallPurpose.AUXILIARY: SegmentRole.AUXILIARY, CallPurpose.SUBAGENT: SegmentRole.SUBAGENT}


class Lines:
    """Pieces of one conversation make a line, and a line has one role: as declared, else by its shape.

    A piece that rewrites its past stays in the line, unless others of the line went on after it began:
    then it is another conversation that shares an opening. Of the lines that nobody declared, the first
    that is a dialogue is the main one, since a subagent begins after the agent that asks for it; and so is
    a dialogue that begins once the main one is over for good, since who asks a subagent waits for it. A
    line that never went on (a title, a summary) is auxiliary, any other a subagent's.
    """

    def __init__(self, pieces: Sequence[Piece], calls: Sequence[Woven], asides: Collection[Woven]) -> None:
        self._asides = asides
        self._repeated = {woven.twin for woven in calls}
        self._piece_of = {woven: piece for piece in pieces for woven in piece.calls}
        self._line_of: dict[Piece, int] = {}
        self._begin(calls)
        self._roles = self._assign(pieces)

    def role(self, piece: Piece) -> SegmentRole:
        return self._roles[self._line_of[piece]]

    def began(self, piece: Piece) -> SegmentStart:
        """Why the piece began."""
        head = piece.head
        if piece.beside:
            return SegmentStart.BRANCH if head.above and not self._repeats(piece) else SegmentStart.RETRY
        if head.base is None:
            first = piece.index == 0 or self.role(piece) is SegmentRole.MAIN
            return SegmentStart.START if first else SegmentStart.SUBAGENT
        if head.purpose is not CallPurpose.MAIN and head.is_exact:
            return SegmentStart.BRANCH
        same_line = self._line_of[piece] == self._line_of[self._piece_of[head.base]]
        if same_line or head.keeps_prompt or head.purpose is CallPurpose.AUXILIARY:
            return SegmentStart.CONTEXT_REWRITTEN
        return SegmentStart.SUBAGENT

    def _begin(self, calls: Sequence[Woven]) -> None:
        """Gives each piece its line, in order of the calls."""
        heirs = _last_exact_heirs(calls)
        lives_until: dict[int, int] = defaultdict(lambda: -1)
        lines = 0
        for woven in calls:
            piece = self._piece_of[woven]
            if woven is piece.head:
                source = self._source(piece)
                line = None if source is None else self._line_of[self._piece_of[source]]
                if line is None or self._leaves(piece, lives_until[line]):
                    line, lines = lines, lines + 1
                self._line_of[piece] = line
            line = self._line_of[piece]
            lives_until[line] = max(lives_until[line], heirs[woven])

    def _source(self, piece: Piece) -> Woven | None:
        """An earlier call of the conversation that the piece is part of."""
        head = piece.head
        if head.twin is not None:
            return head.twin
        return head.above or head.base

    def _leaves(self, piece: Piece, lives_until: int) -> bool:
        """Whether the piece begins a line of its own, beside that of its source."""
        head = piece.head
        if head in self._asides:
            return True
        if piece.beside and head.above is not None and not self._repeats(piece):
            return True
        source = self._source(piece)
        assert source is not None, "a piece without a source begins a line"
        if source.purpose is not head.purpose:
            return True
        rewrites = head.above is None and head.twin is None and not head.keeps_prompt
        return rewrites and lives_until > head.call_index

    def _repeats(self, piece: Piece) -> bool:
        """Whether the very prompt of the piece's first call was asked more than once."""
        return piece.head.twin is not None or piece.head in self._repeated

    def _assign(self, pieces: Sequence[Piece]) -> dict[int, SegmentRole]:
        members: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            members[self._line_of[piece]].append(piece)
        declared = {
            line: role for line, own in members.items() if (role := self._declared(own[0].head)) is not None
        }
        dialogues = [line for line, own in members.items() if line not in declared and _is_dialogue(own)]
        main = _one_after_another([members[line] for line in dialogues]) or _longest(members, declared)
        roles = {}
        for line, own in members.items():
            shape = SegmentRole.SUBAGENT if line in dialogues else SegmentRole.AUXILIARY
            roles[line] = SegmentRole.MAIN if own[0] in main else declared.get(line, shape)
        return roles

    def _declared(self, head: Woven) -> SegmentRole | None:
        return SegmentRole.AUXILIARY if head in self._asides else _DECLARED.get(head.purpose)


def _last_exact_heirs(calls: Sequence[Woven]) -> dict[Woven, int]:
    """The latest call whose context still holds each one's prompt, itself included."""
    last = {woven: woven.call_index for woven in calls}
    for woven in reversed(calls):
        source = woven.above or (woven.base if woven.keeps_prompt else None)
        if source is not None and source.purpose is woven.purpose:
            last[source] = max(last[source], last[woven])
    return last


def _is_dialogue(pieces: Sequence[Piece]) -> bool:
    """More than one prompt was answered; the same one asked again is no second."""
    prompts = {woven.twin or woven for piece in pieces for woven in piece.calls if not woven.aborted}
    return len(prompts) > 1


def _one_after_another(lines: Sequence[Sequence[Piece]]) -> set[Piece]:
    """The first pieces of the line that began first and of each that began when those before were over."""
    found: set[Piece] = set()
    over = -1
    for pieces in sorted(lines, key=_first_call):
        if _first_call(pieces) > over:
            found.add(pieces[0])
            over = max(woven.call_index for piece in pieces for woven in piece.calls)
    return found


def _first_call(pieces: Sequence[Piece]) -> int:
    return min(piece.head.call_index for piece in pieces)


def _longest(members: dict[int, list[Piece]], declared: Collection[int]) -> set[Piece]:
    """The first piece of the longest line that nobody declared."""
    able = [pieces for line, pieces in members.items() if line not in declared]
    longest = max(able, key=lambda pieces: max(len(piece.ids) for piece in pieces), default=())
    return set(longest[:1])
