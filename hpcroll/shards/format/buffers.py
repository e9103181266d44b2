"""Memory that is used again once nobody looks at it.

Fresh pages cost about as much as decompressing into them. So a buffer whose arrays are all gone is handed out
anew, and frames that are read one after the other share a few.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SMALLEST, _LARGEST = 1 << 15, 1 << 24
"""Bytes between which memory is used again; for less, and for what is rare, the allocator is as good."""
_MOST_FREE = 2
_free: defaultdict[int, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=_MOST_FREE))
"""Memory that nobody looks at, by its size, a power of two."""
_lent: dict[int, tuple[weakref.ref[Any], NDArray[np.uint8]]] = {}
"""Memory by the id of the reference to the array that was handed out, which numpy cannot hash."""


def take_buffer(size: int) -> NDArray[np.uint8]:
    """A writable array of `size` bytes, not zeroed; it and its views are its taker's as long as one lives."""
    if not _SMALLEST <= size <= _LARGEST:
        return np.empty(size, np.uint8)
    rounded = 1 << (size - 1).bit_length()
    memory = _free_memory(rounded)
    if memory is None:
        memory = np.empty(rounded, np.uint8)
    # Through a memoryview, so that numpy takes this array, not `memory`, for the base of every view of it.
    handed_out = np.frombuffer(memory.data[:size], np.uint8)
    reference = weakref.ref(handed_out, _give_back)
    _lent[id(reference)] = reference, memory
    return handed_out


def _free_memory(size: int) -> NDArray[np.uint8] | None:
    """At least `size` bytes, a power of two, that nobody looks at; somewhat more rather than fresh ones."""
    for fitting in (size, 2 * size, 4 * size):
        try:
            return _free[fitting].popleft()
        except IndexError:
            continue
    return None


def _give_back(reference: weakref.ref[Any]) -> None:
    _, memory = _lent.pop(id(reference))
    _free[len(memory)].append(memory)
