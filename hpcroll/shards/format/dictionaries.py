"""Trained dictionaries: what small records share, kept once for a run.

A run holds its dictionaries in files `shards/dict.<g>` (g = 0, 1, ...), each published once by link before
any record needs it, never changed, and kept twice, since all records that name it depend on it.

Layout, little-endian (docs/reference/shard-format.md):

    8s  magic     b"hpcrdic" and the major version of the format
    I   count     how many dictionaries follow
    I   reserved  0
    then per dictionary:  I frame kind that it is for, I number, Q bytes
    one zstd frame with the dictionaries in this order, each as zstd takes it
    Q   xxh3-64 of everything before

A dictionary's number is the low half of the xxh3-64 of its bytes (1 where that is 0), so that it means the
same bytes in every file of every run; the frame table of a record names it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import xxhash
import zstandard

from hpcroll.errors import SchemaVersionError, ShardCorruptError, ShardError
from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.compression import Decompressor, compress, decompress

_MAGIC_PREFIX = b"hpcrdic"
_MAJOR = 1
_FIXED = struct.Struct("<8sII")
_ENTRY = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")
_LEVEL = 9


@dataclass(frozen=True, slots=True, eq=False)
class Dictionary:
    """One dictionary, for the frames of `kind`; may be used by several threads at once."""

    kind: int
    number: int
    content: zstandard.ZstdCompressionDict = field(repr=False)
    decompressor: Decompressor = field(repr=False)
    _by_level: dict[int, zstandard.ZstdCompressionDict] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, kind: int, data: bytes) -> Dictionary:
        return cls.numbered(kind, number_of(data), data)

    @classmethod
    def numbered(cls, kind: int, number: int, data: bytes | memoryview) -> Dictionary:
        """The dictionary `data`, whose `number` was checked."""
        content = zstandard.ZstdCompressionDict(data)
        return cls(kind, number, content, Decompressor(content))

    def prepared(
        self, level: int, parameters: zstandard.ZstdCompressionParameters
    ) -> zstandard.ZstdCompressionDict:
        """The dictionary, made ready once for compression with the `parameters` of `level`."""
        with self._lock:
            if level not in self._by_level:
                content = zstandard.ZstdCompressionDict(self.content.as_bytes())
                content.precompute_compress(compression_params=parameters)
                self._by_level[level] = content
            return self._by_level[level]


def number_of(data: bytes) -> int:
    """The number by which records name the dictionary `data`."""
    return (xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF) or 1


def pack_dictionaries(contents: Mapping[int, bytes]) -> bytes:
    """The file of dictionaries `contents`, by the frame kind that each is for."""
    entries = [_ENTRY.pack(kind, number_of(data), len(data)) for kind, data in sorted(contents.items())]
    ordered = b"".join(data for _, data in sorted(contents.items()))
    fixed = _FIXED.pack(_MAGIC_PREFIX + bytes([_MAJOR]), len(entries), 0)
    whole = b"".join([fixed, *entries, compress(ordered, _LEVEL)])
    return whole + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(whole))


def parse_dictionaries(data: bytes, path: Path) -> tuple[Dictionary, ...]:
    """The dictionaries in the bytes of `path`.

    Raises `ShardCorruptError` where they are not as written, `SchemaVersionError` for another major version.
    """
    view = memoryview(data)
    body = view[: -_CHECKSUM.size]
    if (
        len(data) < _FIXED.size + _CHECKSUM.size
        or not data.startswith(_MAGIC_PREFIX)
        or _CHECKSUM.unpack(view[-_CHECKSUM.size :])[0] != xxhash.xxh3_64_intdigest(body)
    ):
        raise ShardCorruptError(f"{path} is no file of dictionaries, or is damaged")
    magic, count, _ = _FIXED.unpack_from(body)
    if magic[7] != _MAJOR:
        raise SchemaVersionError(
            f"{path} has format {magic[7]}, this hpcroll reads {_MAJOR}; use the hpcroll that wrote it"
        )
    table_end = _FIXED.size + count * _ENTRY.size
    entries = list(_ENTRY.iter_unpack(body[_FIXED.size : table_end]))
    ordered = decompress(body[table_end:], sum(size for _, _, size in entries))
    found, start = [], 0
    for kind, number, size in entries:
        found.append(Dictionary.numbered(kind, number, ordered[start : start + size]))
        start += size
    return tuple(found)


class Dictionaries:
    """The dictionaries of a run, read when a record first names one; safe for several threads."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._known: dict[int, Dictionary] = {}

    def find(self, number: int) -> Dictionary | None:
        """The dictionary of that number; None where the run has none.

        Raises `ShardCorruptError` where a file that may hold it is damaged, and its copy too.
        """
        if number not in self._known:
            generation = 0
            while self._read(generation):
                generation += 1
        return self._known.get(number)

    def newest(self) -> dict[int, Dictionary]:
        """By frame kind, the dictionaries that records are to be written with; empty where there are none."""
        newest: tuple[Dictionary, ...] = ()
        generation = 0
        while found := self._read(generation):
            generation, newest = generation + 1, found
        return {dictionary.kind: dictionary for dictionary in newest}

    def _read(self, generation: int) -> tuple[Dictionary, ...]:
        """The dictionaries of one file, or of its copy where it is damaged; empty where there is none."""
        damage: ShardCorruptError | None = None
        for copy in (False, True):
            path = self._paths.dictionary_file(generation, copy=copy)
            data = read_fresh(path)
            if data is None:
                continue
            try:
                found = parse_dictionaries(data, path)
            except ShardCorruptError as error:
                damage = damage or error
                continue
            return tuple(self._known.setdefault(each.number, each) for each in found)
        if damage is not None:
            raise damage
        return ()


@lru_cache(maxsize=64)
def dictionaries_of(paths: RunPaths) -> Dictionaries:
    """The dictionaries of a run, shared by all that read it in this process."""
    return Dictionaries(paths)


def find_dictionary(dictionaries: Dictionaries | None, number: int) -> Dictionary:
    """The dictionary of that number; raises `ShardError` where it is missing."""
    found = dictionaries.find(number) if dictionaries is not None else None
    if found is None:
        raise ShardError(
            f"needs dictionary {number:08x}, which no file shards/dict.* of the run holds; copy these files "
            "from where the shards came from"
        )
    return found
