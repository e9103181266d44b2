"""zstd as packed shards use it."""

from __future__ import annotations

import threading

import xxhash
import zstandard

from hpcroll.errors import ShardCorruptError

_LONG_BYTES = 1 << 20
"""Frames of at least this size are searched for repetitions over their whole length."""
_threads = threading.local()  # one (de)compressor per thread: a shared one crashes under concurrent use


def compress(raw: bytes, level: int) -> bytes:
    """One zstd frame that says how long its content is."""
    return _compressor(level).compress(raw)


def checksum(stored: bytes | memoryview) -> int:
    """xxh3-64 of compressed bytes."""
    return xxhash.xxh3_64_intdigest(stored)


def decompress(stored: bytes | memoryview, raw_bytes: int, what: str) -> bytes:
    """The `raw_bytes` bytes of one zstd frame; raises `ShardCorruptError` that names `what`."""
    try:
        raw = _decompressor().decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise ShardCorruptError(f"{what} does not decompress: {error}") from error
    if len(raw) != raw_bytes:
        raise ShardCorruptError(f"{what} has {len(raw)} bytes, not {raw_bytes}")
    return raw


def _compressor(level: int) -> zstandard.ZstdCompressor:
    by_level: dict[int, zstandard.ZstdCompressor] = _threads.__dict__.setdefault("compressors", {})
    if level not in by_level:
        by_level[level] = zstandard.ZstdCompressor(level=level)
    return by_level[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_threads, "decompressor", None)
    if found is None:
        found = _threads.decompressor = zstandard.ZstdDecompressor()
    return found
