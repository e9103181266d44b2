"""Two tokenisations of one text: how far they say the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcroll.contract import Ids
from hpcroll.gateway.tokens.tokenizer import LightTokenizer
from hpcroll.trajectory import common_length


def splice(
    recorded: Ids, rendered: Ids, tokenizer: LightTokenizer, sampled: Sequence[tuple[int, int]]
) -> Ids:
    """`rendered`, with the longest beginning of `recorded` that says the same in place of its own.

    The same: equal bytes, and equal control tokens in equal places. The beginning ends outside of `sampled`,
    the runs [start, end) of sampled ids in `recorded` (ascending): a reply is taken whole or not at all.
    """
    pieces = tokenizer.pieces
    same = common_length(recorded, rendered)
    if pieces is None or same == min(len(recorded), len(rendered)):
        return rendered
    ours, theirs = recorded[same:].tolist(), rendered[same:].tolist()
    runs = [(start - same, end - same) for start, end in sampled if end > same]
    best = (0, 0)
    left, right = 0, 0
    while (pair := _step(ours, theirs, left, right, pieces, tokenizer.control_ids)) is not None:
        left, right = pair
        while runs and runs[0][1] <= left:
            runs.pop(0)
        if not runs or left <= runs[0][0]:
            best = pair
    if not best[0]:
        return rendered
    return np.concatenate([recorded[: same + best[0]], rendered[same + best[1] :]])


def _step(
    ours: list[int],
    theirs: list[int],
    left: int,
    right: int,
    pieces: list[bytes],
    control: frozenset[int],
) -> tuple[int, int] | None:
    """The next places where both have said the same, after `left` and `right`; None where they differ."""
    if left == len(ours) or right == len(theirs):
        return None
    if ours[left] == theirs[right]:
        return left + 1, right + 1
    mine = other = b""
    while not mine or len(mine) != len(other):
        if len(mine) <= len(other):
            if left == len(ours) or ours[left] in control or not (piece := _piece(ours[left], pieces)):
                return None
            mine, left = mine + piece, left + 1
        else:
            if (
                right == len(theirs)
                or theirs[right] in control
                or not (piece := _piece(theirs[right], pieces))
            ):
                return None
            other, right = other + piece, right + 1
        if not (mine.startswith(other) or other.startswith(mine)):
            return None
    return left, right


def _piece(token: int, pieces: list[bytes]) -> bytes:
    return pieces[token] if token < len(pieces) else b""
