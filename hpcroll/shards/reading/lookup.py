"""Random access: the committed record of one rollout."""

from __future__ import annotations

from collections.abc import Iterator

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.stored import Column, StoredTrajectory, frames_of, stored_record
from hpcroll.shards.level0.scan import records_of, shards_of
from hpcroll.shards.level0.shard_file import OpenShard, committer, marks_of


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
                    return stored_record(Place(name, offset), header, columns, data)
    raise ShardCorruptError(
        f"rollout {ref} is committed by {owner}, but no shard of it holds the record whole; run `hpcroll "
        f"shards verify {paths.root}`"
    )


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
