"""Level-0 shards that stay open between reads."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from hpcroll.contract import RolloutRef
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory, frames_of, stored_record
from hpcroll.shards.level0.scan import records_of
from hpcroll.shards.level0.shard_file import OpenShard, logs_of, marks_in
from hpcroll.shards.level0.walk import ReadCounts

_MOST = 16


class _Kept(NamedTuple):
    shard: OpenShard
    logs: list[bytes]
    """Its marks, as they were when it was opened."""


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

    def read(self, place: Place, columns: frozenset[Column], counts: ReadCounts) -> StoredTrajectory | None:
        """The record at `place`; None where that is not as written."""
        kept = self._kept.get(place.shard)
        if kept is not None and (found := _record_at(kept.shard, place.offset, columns)) is not None:
            self._kept.move_to_end(place.shard)
            return found
        return _record_at(self._open(place.shard, counts).shard, place.offset, columns)

    def read_marked(self, owner: str, ref: RolloutRef, columns: frozenset[Column]) -> StoredTrajectory | None:
        """The record of `ref` by incarnation `owner`, where a mark in an open shard says where; else None."""
        for name, kept in self._kept.items():
            found = _marked(kept, ref, columns) if name.incarnation == owner else None
            if found is not None:
                self._kept.move_to_end(name)
                return found
        return None

    def find(
        self, name: ShardName, ref: RolloutRef, columns: frozenset[Column], counts: ReadCounts
    ) -> StoredTrajectory | None:
        """The record of `ref` in the shard, opened anew: where a mark says, else where a header names it."""
        kept = self._open(name, counts)
        return _marked(kept, ref, columns) or _scanned(kept.shard, ref, columns)

    def _open(self, name: ShardName, counts: ReadCounts) -> _Kept:
        if (stale := self._kept.pop(name, None)) is not None:
            stale.shard.close()
        counts.opens += 3
        kept = self._kept[name] = _Kept(OpenShard(self._paths, name), logs_of(self._paths, name))
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)[1].shard.close()
        return kept


def _marked(kept: _Kept, ref: RolloutRef, columns: frozenset[Column]) -> StoredTrajectory | None:
    offsets = marks_in(kept.logs, kept.shard.name, only=ref)
    return _first_whole(kept.shard, offsets, ref, columns)


def _scanned(shard: OpenShard, ref: RolloutRef, columns: frozenset[Column]) -> StoredTrajectory | None:
    offsets = (offset for offset, header in records_of(shard) if header.ref == ref)
    return _first_whole(shard, offsets, ref, columns)


def _first_whole(
    shard: OpenShard, offsets: Iterable[int], ref: RolloutRef, columns: frozenset[Column]
) -> StoredTrajectory | None:
    for offset in offsets:
        found = _record_at(shard, offset, columns)
        if found is not None and found.ref == ref:
            return found
    return None


def _record_at(shard: OpenShard, offset: int, columns: frozenset[Column]) -> StoredTrajectory | None:
    header = shard.header_at(offset)
    data = None if header is None else shard.frames_at(offset, header, frames_of(columns))
    if header is None or data is None:
        return None
    return stored_record(Place(shard.name, offset), header, columns, data)


def _close(kept: OrderedDict[ShardName, _Kept]) -> None:
    while kept:
        kept.popitem()[1].shard.close()
