"""The cursors of named followers, as retention sees them: who still needs what of level 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from hpcroll.fs.atomic import list_names, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import ShardName


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a follower has come: (seen, pending offsets) per level-0 shard, and the pack it reads next."""

    trainer: str
    shards: dict[ShardName, tuple[int, int]]
    """`seen` in bytes, and how many entries before it are pending."""
    pack: int
    expires_s: float

    def needs(self, name: ShardName, *, end: int, packed_by: int) -> bool:
        """Whether it may still read shard `name`, whose `end` bytes pack number `packed_by` was the last to
        take from."""
        seen, pending = self.shards.get(name, (0, 0))
        return self.pack <= packed_by and (seen < end or pending > 0)


@dataclass(slots=True)
class _Watched:
    content: bytes
    since_s: float


class Cursors:
    """The cursors under readers/, watched over time.

    A cursor expires when its file stood still for as long as it says itself, on this process's monotonic
    clock: two nodes' clocks are never compared, so a process that has just begun takes none for expired.
    """

    def __init__(self, paths: RunPaths, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._watched: dict[str, _Watched] = {}

    def unexpired(self, *, without: Collection[str] = ()) -> tuple[list[Cursor], list[str]]:
        """The cursors that count, those of trainers `without` left out; and the trainers whose cursor cannot
        be read, which might need anything."""
        found, unreadable = [], []
        for trainer in self._trainers():
            data = read_fresh(self._paths.reader_cursor(trainer))
            if trainer in without or data is None:
                continue
            try:
                cursor = _parse(trainer, data)
            except (ValueError, KeyError, TypeError, AttributeError):
                unreadable.append(trainer)
                continue
            if self._stood_still_s(trainer, data) < cursor.expires_s:
                found.append(cursor)
        return found, unreadable

    def _trainers(self) -> Iterator[str]:
        return (unquote(name) for name in sorted(list_names(self._paths.readers)))

    def _stood_still_s(self, trainer: str, data: bytes) -> float:
        watched = self._watched.get(trainer)
        if watched is None or watched.content != data:
            self._watched[trainer] = _Watched(data, self._clock())
            return 0.0
        return self._clock() - watched.since_s


def _parse(trainer: str, data: bytes) -> Cursor:
    fields: dict[str, Any] = json.loads(data)
    shards = {}
    for text, (seen, pending) in fields["shards"].items():
        name = ShardName.parse(text)
        if name is None:
            raise ValueError(f"{text!r} names no shard")
        shards[name] = (int(seen), len(pending))
    return Cursor(trainer, shards, int(fields["pack"][0]), float(fields["expires_s"]))
