"""Which row goes to which micro-batch of which rank: the same number everywhere, about the same tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Layout = tuple[tuple[tuple[int, ...], ...], ...]
"""Per rank, per micro-batch: the numbers of its rows, ascending."""


def balance(lengths: Sequence[int], *, ranks: int, max_tokens: int) -> Layout:
    """Lays rows of `lengths` tokens (each at most `max_tokens`) out over `ranks`.

    Every rank gets the same number of micro-batches, as few as the rows are found to fit into, none above
    `max_tokens`. Micro-batch i has about as many tokens on every rank. One is empty only where there are
    fewer rows than micro-batches. The same input gives the same layout everywhere.
    """
    each = max(1, -(-sum(lengths) // (ranks * max_tokens)))
    while (bins := _fill(lengths, each * ranks, max_tokens)) is None:
        each += 1
    _spread(bins)
    loads = [sum(lengths[row] for row in chosen) for chosen in bins]
    by_load = sorted(range(len(bins)), key=lambda number: (-loads[number], bins[number]))
    per_rank: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for first in range(0, len(by_load), ranks):
        # The heaviest of these goes to whoever has least so far.
        takers = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, number in zip(takers, by_load[first : first + ranks], strict=True):
            per_rank[rank].append(tuple(sorted(bins[number])))
            totals[rank] += loads[number]
    return tuple(tuple(batches) for batches in per_rank)


def _fill(lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """The rows in `count` bins, evenly if that fits, else tightly; None where neither does."""
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return _evenly(lengths, longest_first, count, max_tokens) or _tightly(
        lengths, longest_first, count, max_tokens
    )


def _evenly(
    lengths: Sequence[int], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Each row to the bin that has least."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in order:
        load, number = heap[0]
        if load + lengths[row] > max_tokens:
            return None
        bins[number].append(row)
        heapq.heapreplace(heap, (load + lengths[row], number))
    return bins


def _tightly(
    lengths: Sequence[int], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Each row to the first bin that it fits into."""
    bins: list[list[int]] = [[] for _ in range(count)]
    free = [max_tokens] * count
    for row in order:
        number = next((n for n in range(count) if free[n] >= lengths[row]), None)
        if number is None:
            return None
        bins[number].append(row)
        free[number] -= lengths[row]
    return bins


def _spread(bins: list[list[int]]) -> None:
    """Gives empty bins a row of those that have several, while there are any."""
    for chosen in bins:
        if not chosen and (donor := max(bins, key=len)) and len(donor) > 1:
            chosen.append(donor.pop())
