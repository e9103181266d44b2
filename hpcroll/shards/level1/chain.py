"""The chain of packs: manifests 0, 1, 2, ... of which each is created once and never changes.

A manifest names its data file, which was durable before, and says which level-0 entries it holds. What all
manifests up to one say together is a frontier, of the same shape as a reader's cursor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpcroll.contract import canonical_json, require_major
from hpcroll.errors import ShardCorruptError
from hpcroll.fs.atomic import make_directories, publish, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import Place, ShardName

SCHEMA = "1.0"
_READABLE_MAJOR = 1


@dataclass(frozen=True, slots=True)
class InputRange:
    """What a pack did to one level-0 shard: the frontier there moved from byte offset `start` to `end`.

    `left`: offsets of entries below `end` that neither this pack nor an earlier one holds and that may still
    be committed or packed. Every other entry below `end` is packed, or will never be committed.
    """

    start: int
    end: int
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The `generation`-th pack of a run. `index_*` say where the index lies in the data file, in bytes, and
    its xxh3-64."""

    generation: int
    file: str
    """Name of the data file within packs/."""
    size_bytes: int
    rows: int
    index_offset: int
    index_bytes: int
    index_checksum: int
    inputs: Mapping[ShardName, InputRange]

    def to_json(self) -> str:
        """Canonical JSON with a checksum of its own."""
        fields: dict[str, Any] = {
            "schema_version": SCHEMA,
            "generation": self.generation,
            "file": self.file,
            "size_bytes": self.size_bytes,
            "rows": self.rows,
            "index": [self.index_offset, self.index_bytes, f"{self.index_checksum:016x}"],
            "inputs": {str(name): [r.start, r.end, list(r.left)] for name, r in self.inputs.items()},
        }
        return canonical_json({**fields, "xxh3_64": _checksum(fields)})

    def to_bytes(self) -> bytes:
        """The file: the JSON text twice, a line each, since all packs after it depend on it."""
        line = self.to_json().encode() + b"\n"
        return line + line

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path) -> Manifest:
        """The inverse of `to_bytes`, from the first line that is as written.

        Raises `ShardCorruptError` where neither is, `SchemaVersionError` for a newer major.
        """
        half = len(data) // 2
        try:
            return cls.from_json(data[:half], path=path)
        except ShardCorruptError:
            return cls.from_json(data[half:], path=path)

    @classmethod
    def from_json(cls, data: bytes, *, path: Path) -> Manifest:
        """The inverse of `to_json`; raises `ShardCorruptError`, or `SchemaVersionError` for a newer major."""
        try:
            fields = json.loads(data)
            written = canonical_json(fields).encode() + b"\n"
            if fields.pop("xxh3_64") != _checksum(fields) or written != data:
                raise ValueError("its checksum does not match")
            require_major(fields["schema_version"], _READABLE_MAJOR, path)
            offset, size, checksum = fields["index"]
            return cls(
                generation=int(fields["generation"]),
                file=fields["file"],
                size_bytes=int(fields["size_bytes"]),
                rows=int(fields["rows"]),
                index_offset=int(offset),
                index_bytes=int(size),
                index_checksum=int(checksum, 16),
                inputs=dict(_inputs(fields["inputs"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShardCorruptError(
                f"{path} is no manifest of a pack, or was damaged ({error}); restore the file: the order of "
                "packs cannot be told without it"
            ) from error


@dataclass(slots=True)
class Frontier:
    """What packs hold of one level-0 shard: all entries before `seen`, except those at `pending`."""

    seen: int = 0
    pending: set[int] = field(default_factory=set)

    def holds(self, offset: int) -> bool:
        """Whether the entry at `offset` is packed, or will never be committed."""
        return offset < self.seen and offset not in self.pending


class PackChain:
    """The manifests of a run, read as far as they exist; each is read once."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._manifests: list[Manifest] = []
        self._frontier: dict[ShardName, Frontier] = {}
        self.damaged: list[Path] = []
        """Manifests of which one of the two lines is not as written."""

    def __len__(self) -> int:
        return len(self._manifests)

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self._manifests)

    def __getitem__(self, generation: int) -> Manifest:
        return self._manifests[generation]

    def refresh(self) -> int:
        """Reads the manifests that were published since; returns how many there are now in all.

        One open where there is nothing new. Raises like `Manifest.from_bytes`.
        """
        while True:
            path = self._paths.pack_manifest(len(self._manifests))
            data = read_fresh(path)
            if data is None:
                return len(self._manifests)
            manifest = Manifest.from_bytes(data, path=path)
            if data[: len(data) // 2] != data[len(data) // 2 :]:
                self.damaged.append(path)
            self._manifests.append(manifest)
            for name, moved in manifest.inputs.items():
                self._frontier[name] = Frontier(moved.end, set(moved.left))

    def frontier(self, name: ShardName) -> Frontier:
        """What the packs read so far hold of shard `name`."""
        return self._frontier.get(name) or Frontier()

    def holds(self, place: Place) -> bool:
        """Whether the entry at `place` is packed, or will never be committed."""
        return self.frontier(place.shard).holds(place.offset)

    def shards(self) -> tuple[ShardName, ...]:
        """Every level-0 shard that a manifest names, also those that retention deleted."""
        return tuple(self._frontier)

    def data_file(self, manifest: Manifest) -> Path:
        return self._paths.packs / manifest.file

    def append(self, manifest: Manifest) -> bool:
        """Publishes the next element, durable on return; False where another packer was first.

        Its data file must be durable before.
        """
        path = self._paths.pack_manifest(manifest.generation)
        if not path.parent.is_dir():
            make_directories([path.parent])  # a run from before there were packs
        return publish(path, manifest.to_bytes())


def _checksum(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(canonical_json(fields).encode())


def _inputs(fields: Mapping[str, Any]) -> Iterator[tuple[ShardName, InputRange]]:
    for text, (start, end, left) in fields.items():
        name = ShardName.parse(text)
        if name is None:
            raise ValueError(f"{text!r} names no shard")
        yield name, InputRange(int(start), int(end), tuple(int(offset) for offset in left))
