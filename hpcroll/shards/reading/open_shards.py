"""Level-0 shards that stay open between reads."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Set
from functools import cached_property

from hpcroll.contract import RolloutRef
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory, frames_of, stored_record
from hpcroll.shards.level0.scan import records_of
from hpcroll.shards.level0.shard_file import OpenShard, logs_of, marks_in
from hpcroll.shards.level0.walk import ReadCounts

_MOST = 16


class _Kept:
    """A shard, and its marks as they were when they were first asked for."""

    def __init__(self, paths: RunPaths, name: ShardName) -> None:
        self._paths = paths
        self.shard = OpenShard(paths, name)

    @cached_property
    def _logs(self) -> list[bytes]:
        return logs_of(self._paths, self.shard.name)

    def marked(self, ref: RolloutRef) -> Iterable[int]:
        """Where marks say that records of `ref` stand."""
        return marks_in(self._logs, self.shard.name, only=ref)

    def named(self, ref: RolloutRef) -> Iterable[int]:
        """Where headers name `ref`."""
        return (offset for offset, header in records_of(self.shard) if header.ref == ref)

    def record(self, offset: int, columns: frozenset[Column]) -> StoredTrajectory | None:
        """The record at `offset`; None where that is not as written."""
        header = self.shard.header_at(offset)
        data = None if header is None else self.shard.frames_at(offset, header, frames_of(columns))
        if header is None or data is None:
            return None
        return stored_record(Place(self.shard.name, offset), header, columns, data)

    def first_of(
        self, ref: RolloutRef, offsets: Iterable[int], columns: frozenset[Column]
    ) -> StoredTrajectory | None:
        """The first record of `ref` among those at `offsets`."""
        records = (self.record(offset, columns) for offset in offsets)
        return next((found for found in records if found is not None and found.ref == ref), None)


class OpenShards:
    """The shards that were read last, by place or by rollout.

    What an open shard holds as written stays so and may be handed out. Anything else is looked for in the
    shard opened anew, so that a network file system asks its server. Shards that are gone raise `OSError`.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._kept: OrderedDict[ShardName, _Kept] = OrderedDict()
        weakref.finalize(self, _close, self._kept)

    def close(self) -> None:
        """Closes what is open; the next read opens it again."""
        _close(self._kept)

    def close_others(self, names: Set[ShardName]) -> None:
        """Closes what is not among `names`."""
        for name in self._kept.keys() - names:
            self._kept.pop(name).shard.close()

    def read(self, place: Place, columns: frozenset[Column], counts: ReadCounts) -> StoredTrajectory | None:
        """The record at `place`; None where that is not as written."""
        kept = self._kept.get(place.shard)
        if kept is not None and (found := kept.record(place.offset, columns)) is not None:
            self._kept.move_to_end(place.shard)
            return found
        return self._open(place.shard, counts).record(place.offset, columns)

    def read_marked(self, owner: str, ref: RolloutRef, columns: frozenset[Column]) -> StoredTrajectory | None:
        """The record of `ref` by incarnation `owner`, where a mark in an open shard says where; else None."""
        for name, kept in self._kept.items():
            found = kept.first_of(ref, kept.marked(ref), columns) if name.incarnation == owner else None
            if found is not None:
                self._kept.move_to_end(name)
                return found
        return None

    def find(
        self, name: ShardName, ref: RolloutRef, columns: frozenset[Column], counts: ReadCounts
    ) -> StoredTrajectory | None:
        """The record of `ref` in the shard, opened anew: where a mark says, else where a header names it."""
        kept = self._open(name, counts)
        counts.opens += 2
        return kept.first_of(ref, kept.marked(ref), columns) or kept.first_of(ref, kept.named(ref), columns)

    def _open(self, name: ShardName, counts: ReadCounts) -> _Kept:
        if (stale := self._kept.pop(name, None)) is not None:
            stale.shard.close()
        counts.opens += 1
        kept = self._kept[name] = _Kept(self._paths, name)
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)[1].shard.close()
        return kept


def _close(kept: OrderedDict[ShardName, _Kept]) -> None:
    while kept:
        kept.popitem()[1].shard.close()
