"""What all blocks of a pack may refer to, so that a text in many groups is stored once."""

from __future__ import annotations

import zstandard

from hpcroll.shards.format.compression import Decompressor

_SHORTEST_MATCH = 6
"""Bytes. zstd's own levels take shorter matches, which makes these frames larger and slower to read."""


class PackDictionary:
    """Bytes that zstd frames of a pack refer back to; may be used by several threads at once."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        # Never as a dictionary of zstd's own, whatever the bytes begin with.
        self._prepared = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        self.decompressor = Decompressor(self._prepared)

    def compress(self, raw: bytes, level: int) -> bytes:
        """One zstd frame that says how long its content is."""
        sizes = {"source_size": len(raw), "dict_size": len(self.content)}
        usual = zstandard.ZstdCompressionParameters.from_level(level, **sizes)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, **sizes, min_match=max(usual.min_match, _SHORTEST_MATCH)
        )
        context = zstandard.ZstdCompressor(compression_params=parameters, dict_data=self._prepared)
        return context.compress(raw)
