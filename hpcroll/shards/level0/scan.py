"""What stands in a shard or belongs to an incarnation, found by looking."""

from __future__ import annotations

from collections.abc import Iterator

from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.level0.shard_file import OpenShard, is_there, list_shards


def records_of(shard: OpenShard) -> Iterator[tuple[int, Header]]:
    """Every sound header of `shard` with its offset, damaged stretches passed over."""
    offset: int | None = 0
    while offset is not None and offset < shard.size:
        header = shard.header_at(offset)
        if header is None:
            offset = shard.next_header_after(offset)
        else:
            yield offset, header
            offset += header.record_bytes


def shards_of(paths: RunPaths, incarnation: str) -> Iterator[ShardName]:
    """The shards of the incarnation that are there, in order; none where it was never one of this run.

    Numbers that are missing before others were packed and removed. A listing only tells of those: it may
    be older than the newest shard.
    """
    index = 0
    while True:
        if is_there(paths.shard_file(incarnation, index)):
            yield ShardName(incarnation, index)
            index += 1
            continue
        later = [name.index for name in list_shards(paths) if name.incarnation == incarnation]
        index = min((other for other in later if other > index), default=-1)
        if index < 0:
            return
