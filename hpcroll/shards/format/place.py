"""Where a record lies: an entry of a worker's shard, also after that shard was packed."""

from __future__ import annotations

from dataclasses import dataclass

from hpcroll.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """The `index`-th shard of an incarnation; the order of names is the order of reading."""

    incarnation: str
    index: int

    @classmethod
    def parse(cls, text: str) -> ShardName | None:
        """The inverse of `str`; None for anything else."""
        incarnation, dot, index = text.rpartition(".")
        return cls(incarnation, int(index)) if dot and incarnation and index.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.index}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies; enough to read it again."""

    shard: ShardName
    offset: int


def place_of(shard: str, offset: int) -> Place:
    """The place that a saved state names; raises `ConfigError` where it names no shard."""
    name = ShardName.parse(shard)
    if name is None:
        raise ConfigError(f"reader state names {shard!r}, which is no shard")
    return Place(name, int(offset))
