"""zstd with contexts that are kept: each is used by one thread at a time, since a shared one crashes.

Idle contexts are pooled, so that there are as many as frames are worked on at once, not as there are threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import zstandard

from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.buffers import take_buffer

if TYPE_CHECKING:
    from hpcroll.shards.format.dictionaries import Dictionary

_WINDOW_LOG = 20
"""Reaches from the end of a long frame back into its dictionary."""
_TYPICAL_BYTES = 128 << 10
"""Size of a frame, by which zstd sizes its tables; those of a dictionary are copied for each frame."""

# A deque gives up and takes back an item without any lock of ours.
_compressors: defaultdict[tuple[int, Dictionary | None], deque[zstandard.ZstdCompressor]]
_compressors = defaultdict(deque)


def compress(raw: bytes, level: int, dictionary: Dictionary | None = None) -> bytes:
    """One zstd frame that says how long its content is."""
    idle = _compressors[level, dictionary]
    try:
        context = idle.pop()
    except IndexError:
        context = _compressor(level, dictionary)
    stored = context.compress(raw)
    idle.append(context)
    return stored


class Decompressor:
    """Contexts for frames that refer to the dictionary `content` (None: to none)."""

    def __init__(self, content: zstandard.ZstdCompressionDict | None = None) -> None:
        self._content = content
        self._idle: deque[zstandard.ZstdDecompressor] = deque()

    def decompress(self, stored: bytes | memoryview, raw_bytes: int) -> memoryview:
        """The `raw_bytes` bytes of one zstd frame, read-only; raises `ShardCorruptError`."""
        target = take_buffer(raw_bytes).data
        try:
            context = self._idle.pop()
        except IndexError:
            context = zstandard.ZstdDecompressor(dict_data=self._content)
        try:
            # In one step and without a window of its own, since source and target are whole.
            with context.stream_reader(stored) as reader:
                count: int = reader.readinto(target)
        except zstandard.ZstdError as error:
            raise ShardCorruptError(f"its bytes do not decompress: {error}") from error
        self._idle.append(context)
        if count != raw_bytes:
            raise ShardCorruptError(f"it has {count} bytes, not {raw_bytes}")
        return target.toreadonly()


_plain = Decompressor()


def decompress(stored: bytes | memoryview, raw_bytes: int) -> memoryview:
    """The `raw_bytes` bytes of one zstd frame without a dictionary, read-only; raises `ShardCorruptError`."""
    return _plain.decompress(stored, raw_bytes)


def _compressor(level: int, dictionary: Dictionary | None) -> zstandard.ZstdCompressor:
    if dictionary is None:
        return zstandard.ZstdCompressor(level=level)
    usual = zstandard.ZstdCompressionParameters.from_level(level, source_size=_TYPICAL_BYTES)
    parameters = zstandard.ZstdCompressionParameters(
        window_log=_WINDOW_LOG,
        hash_log=usual.hash_log,
        chain_log=usual.chain_log,
        search_log=usual.search_log,
        min_match=usual.min_match,
        target_length=usual.target_length,
        strategy=usual.strategy,
    )
    content = dictionary.prepared(level, parameters)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=content)
