"""Memory that is used again once nobody looks at it.

Fresh pages cost about as much as decompressing into them. So a buffer whose arrays are all gone is handed out
anew, and blocks that are read one after the other share a few.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque

import numpy as np
import zstandard
from numpy.typing import NDArray

from hpcroll.errors import ShardCorruptError
from hpcroll.shards.level1.dictionary import PackDictionary

_SMALLEST, _LARGEST = 1 << 16, 1 << 24
"""Bytes between which memory is used again; for less, and for what is rare, the allocator is as good."""
_MOST_FREE = 2
_free: defaultdict[int, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=_MOST_FREE))
"""Memory that nobody looks at, by its size, a power of two."""
_threads = threading.local()  # one decompressor per thread: a shared one crashes under concurrent use


def take_buffer(size: int) -> NDArray[np.uint8]:
    """A writable array of `size` bytes, not zeroed; it and its views are its taker's as long as one lives."""
    if not _SMALLEST <= size <= _LARGEST:
        return np.empty(size, np.uint8)
    free = _free[1 << (size - 1).bit_length()]
    try:
        memory = free.popleft()
    except IndexError:
        memory = np.empty(1 << (size - 1).bit_length(), np.uint8)
    # Through a memoryview, so that numpy takes this array, not `memory`, for the base of every view of it.
    handed_out = np.frombuffer(memory.data[:size], np.uint8)
    weakref.finalize(handed_out, free.append, memory).atexit = False
    return handed_out


def decompress_into(
    stored: memoryview, target: memoryview, what: str, dictionary: PackDictionary | None = None
) -> None:
    """Decompresses one zstd frame into `target`, which it fills; raises `ShardCorruptError` about `what`."""
    context = _decompressor() if dictionary is None else dictionary.decompressor
    try:
        # In one step and without a window of its own, since source and target are whole.
        with context.stream_reader(stored) as reader:
            count: int = reader.readinto(target)
    except zstandard.ZstdError as error:
        raise ShardCorruptError(f"{what} does not decompress: {error}") from error
    if count != len(target):
        raise ShardCorruptError(f"{what} has {count} bytes, not {len(target)}")


def decompress(
    stored: memoryview, raw_bytes: int, what: str, dictionary: PackDictionary | None = None
) -> memoryview:
    """The `raw_bytes` bytes of one zstd frame; raises `ShardCorruptError` about `what`."""
    target = take_buffer(raw_bytes).data
    decompress_into(stored, target, what, dictionary)
    return target


def _decompressor() -> zstandard.ZstdDecompressor:
    context: zstandard.ZstdDecompressor | None = getattr(_threads, "decompressor", None)
    if context is None:
        context = _threads.decompressor = zstandard.ZstdDecompressor()
    return context
