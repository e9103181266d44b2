"""zstd with contexts that are kept: one per thread, since a shared one crashes under concurrent use."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import zstandard

from hpcroll.errors import ShardCorruptError

if TYPE_CHECKING:
    from hpcroll.shards.format.dictionaries import Dictionary

_threads = threading.local()


def compress(raw: bytes, level: int, dictionary: Dictionary | None = None) -> bytes:
    """One zstd frame that says how long its content is."""
    contexts: dict[tuple[int, Dictionary | None], zstandard.ZstdCompressor]
    contexts = _threads.__dict__.setdefault("compressors", {})
    context = contexts.get((level, dictionary))
    if context is None:
        content = None if dictionary is None else dictionary.for_level(level)
        context = zstandard.ZstdCompressor(level=level, dict_data=content)
        contexts[level, dictionary] = context
    return context.compress(raw)


def decompress(
    stored: bytes | memoryview, raw_bytes: int, what: str, dictionary: Dictionary | None = None
) -> bytes:
    """The `raw_bytes` bytes of one zstd frame; raises `ShardCorruptError`, which names `what`."""
    contexts: dict[Dictionary | None, zstandard.ZstdDecompressor]
    contexts = _threads.__dict__.setdefault("decompressors", {})
    context = contexts.get(dictionary)
    if context is None:
        content = None if dictionary is None else dictionary.content
        context = contexts[dictionary] = zstandard.ZstdDecompressor(dict_data=content)
    try:
        raw = context.decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise ShardCorruptError(f"{what} does not decompress: {error}") from error
    if len(raw) != raw_bytes:
        raise ShardCorruptError(f"{what} has {len(raw)} bytes, not {raw_bytes}")
    return raw
