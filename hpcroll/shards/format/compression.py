"""zstd with contexts that are kept: each is used by one thread at a time, since a shared one crashes.

Idle contexts are pooled, so that there are as many as frames are worked on at once, not as there are threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import zstandard

from hpcroll.errors import ShardCorruptError

if TYPE_CHECKING:
    from hpcroll.shards.format.dictionaries import Dictionary

_WINDOW_LOG = 20
"""Reaches from the end of a long frame back into its dictionary."""
_TYPICAL_BYTES = 128 << 10
"""Size of a frame, by which zstd sizes its tables; those of a dictionary are copied for each frame."""

# A deque gives up and takes back an item without any lock of ours.
_compressors: defaultdict[tuple[int, Dictionary | None], deque[zstandard.ZstdCompressor]]
_compressors = defaultdict(deque)
_decompressors: defaultdict[Dictionary | None, deque[zstandard.ZstdDecompressor]] = defaultdict(deque)


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


def decompress(stored: bytes | memoryview, raw_bytes: int, dictionary: Dictionary | None = None) -> bytes:
    """The `raw_bytes` bytes of one zstd frame; raises `ShardCorruptError`."""
    idle = _decompressors[dictionary]
    try:
        context = idle.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor(dict_data=None if dictionary is None else dictionary.content)
    try:
        raw = context.decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise ShardCorruptError(f"its bytes do not decompress: {error}") from error
    idle.append(context)
    if len(raw) != raw_bytes:
        raise ShardCorruptError(f"it has {len(raw)} bytes, not {raw_bytes}")
    return raw


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
