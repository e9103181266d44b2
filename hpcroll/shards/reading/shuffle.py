"""Shuffling within a window: groups leave in a seeded order, at most a window later than they came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from hpcroll.errors import ConfigError
from hpcroll.shards.format.place import place_of
from hpcroll.shards.reading.groups import Fate, Held, ReadyGroup


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of a run's groups; each group belongs to one, whatever level it lies on."""

    index: int = 0
    count: int = 1

    def split(self, index: int, count: int) -> Part:
        """Part `index` of `count` of this part."""
        if not 0 <= index < count:
            raise ConfigError(f"split: part {index} is not one of the {count} parts from 0")
        return Part(self.index + self.count * index, self.count * count)

    def owns(self, group_id: str) -> bool:
        return self.count == 1 or xxhash.xxh3_64_intdigest(group_id.encode()) % self.count == self.index


EVERYTHING = Part()


@dataclass(frozen=True, slots=True)
class Shuffle:
    """`window`: how many groups (rollouts, where a reader delivers single ones) wait to be drawn from."""

    seed: int
    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"window is {self.window}; it must be 1 or more")


@dataclass(slots=True)
class ShuffleWindow:
    """What waits, as places; the order depends on the seed and on the order of arrival alone."""

    shuffle: Shuffle | None
    _waiting: list[ReadyGroup] = field(default_factory=list)
    _drawn: int = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def add(self, ready: ReadyGroup) -> Iterator[ReadyGroup]:
        """Takes a group; what leaves for it. Without a shuffle that is the group itself."""
        if self.shuffle is None:
            yield ready
            return
        for member in ready.members:
            member.stored = None
        self._waiting.append(ready)
        if len(self._waiting) > self.shuffle.window:
            yield self._draw()

    def rest(self) -> Iterator[ReadyGroup]:
        """What is left at the end of the stream."""
        while self._waiting:
            yield self._draw()

    def state(self) -> dict[str, Any]:
        """As JSON."""
        groups = [
            [
                ready.group_id,
                ready.size,
                [[m.sample_index, str(m.place.shard), m.place.offset, int(m.fate)] for m in ready.members],
            ]
            for ready in self._waiting
        ]
        return {"drawn": self._drawn, "waiting": groups}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._drawn = int(state["drawn"])
        self._waiting = [
            ReadyGroup(
                group_id,
                size,
                tuple(Held(index, place_of(shard, at), Fate(fate)) for index, shard, at, fate in members),
            )
            for group_id, size, members in state["waiting"]
        ]

    def _draw(self) -> ReadyGroup:
        assert self.shuffle is not None
        chance = xxhash.xxh3_64_intdigest(f"{self.shuffle.seed}/{self._drawn}".encode())
        index = chance % len(self._waiting)
        self._drawn += 1
        self._waiting[index], self._waiting[-1] = self._waiting[-1], self._waiting[index]
        return self._waiting.pop()
