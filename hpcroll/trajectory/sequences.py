"""Token sequences side by side."""

from __future__ import annotations

from hpcroll.contract import Ids

_FIRST_BLOCK = 4096


def common_length(left: Ids, right: Ids) -> int:
    """How many leading ids the two share; strangers cost one small block, whatever their length."""
    length, start, block = min(len(left), len(right)), 0, _FIRST_BLOCK
    while start < length:
        stop = min(start + block, length)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = stop, block * 4
    return length
