"""Random access: the committed record of one rollout."""

from __future__ import annotations

from collections.abc import Iterator

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.frames import Header
from hpcroll.shards.shard_file import OpenShard, ShardName, committer, is_there, marks_of
from hpcroll.shards.stored import Column, Place, StoredTrajectory, frames_of


def find_committed(
    paths: RunPaths, leg: str, ref: RolloutRef, columns: frozenset[Column]
) -> StoredTrajectory:
    """The record that `done` confirms for `ref`: through the marks of its owner, else by scanning.

    Raises `ShardError` where nothing is committed, `ShardCorruptError` where the record is not found whole.
    """
    owner = committer(paths, leg, ref)
    if owner is None:
        raise ShardError(f"rollout {ref} has no committed result yet; see `hpcroll status {paths.root}`")
    kinds = frames_of(columns)
    for name in shards_of(paths, owner):
        with OpenShard(paths, name) as shard:
            for offset, header in _candidates(paths, shard, ref):
                data = shard.frames_at(offset, header, kinds)
                if data is not None:
                    return StoredTrajectory(Place(name, offset), header, columns, data)
    raise ShardCorruptError(
        f"rollout {ref} is committed by {owner}, but no shard of it holds the record whole; run `hpcroll "
        f"shards verify {paths.root}`"
    )


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
    """The shards that the incarnation has opened, in order; none where it was never one of this run."""
    index = 0
    while is_there(paths.shard_file(incarnation, index)):
        yield ShardName(incarnation, index)
        index += 1


def _candidates(paths: RunPaths, shard: OpenShard, ref: RolloutRef) -> Iterator[tuple[int, Header]]:
    """Where a record of `ref` stands: the marked place first, then wherever a header names it."""
    marked = marks_of(paths, shard.name, only=ref)
    for offset in marked:
        header = shard.header_at(offset)
        if header is not None and header.ref == ref:
            yield offset, header
    for offset, header in records_of(shard):
        if header.ref == ref and offset not in marked:
            yield offset, header
