"""Random access: the committed record of one rollout, or of each of a group, on whichever level it lies."""

from __future__ import annotations

from collections.abc import Iterator

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.fs.atomic import list_names
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.stored import Column, StoredTrajectory, frames_of, stored_record
from hpcroll.shards.level0.scan import records_of, shards_of
from hpcroll.shards.level0.shard_file import OpenShard, committer, marks_of
from hpcroll.shards.reading.groups import Group
from hpcroll.shards.reading.store import GONE, Store


def find_committed(store: Store, leg: str, ref: RolloutRef, columns: frozenset[Column]) -> StoredTrajectory:
    """The record that `done` confirms for `ref`: in a pack, through the marks of its owner, or by scanning.

    Raises `ShardError` where nothing is committed, `ShardCorruptError` where the record is not found whole.
    """
    store.counts.opens += 1
    owner = committer(store.paths, leg, ref)
    if owner is None:
        raise ShardError(
            f"rollout {ref} has no committed result yet; see `hpcroll status {store.paths.root}`"
        )
    found = store.packed_rollout(ref, owner, columns) or _on_level0(store, ref, owner, columns)
    if found is None and store.has_news():
        found = store.packed_rollout(ref, owner, columns)
    if found is None:
        raise ShardCorruptError(
            f"rollout {ref} is committed by {owner}, but no shard of it holds the record whole, and no "
            f"pack does; run `hpcroll shards verify {store.paths.root}`"
        )
    return found


def find_group(store: Store, leg: str, group_id: str, columns: frozenset[Column]) -> Group:
    """What is committed of a group, by sample index; raises `ShardError` where nothing is."""
    segment, slash, number = group_id.partition("/g")
    if not slash or not number.isdecimal():
        raise ShardError(f"{group_id!r} is not a group id: expected SEGMENT/gNUMBER")
    size = _group_size(store, leg, segment)
    first = int(number) * size if size else 0
    members = []
    for ordinal in range(first, first + size):
        ref = RolloutRef(segment, ordinal)
        store.counts.opens += 1
        if committer(store.paths, leg, ref) is not None:
            members.append(find_committed(store, leg, ref, columns))
    if not members:
        raise ShardError(f"group {group_id} has no committed result; see `hpcroll status {store.paths.root}`")
    return Group(group_id, size, len(members), tuple(members))


def _group_size(store: Store, leg: str, segment: str) -> int:
    """How many samples each task of the manifest segment has, as any committed rollout of it says; 0 where
    there is none."""
    folder = store.paths.done / leg / segment
    for fanout in list_names(folder):
        store.counts.listings += 1
        for name in list_names(folder / fanout):
            if name.isdecimal():
                ref = RolloutRef(segment, int(name))
                return find_committed(store, leg, ref, frozenset()).summary.group_size
    return 0


def _on_level0(
    store: Store, ref: RolloutRef, owner: str, columns: frozenset[Column]
) -> StoredTrajectory | None:
    kinds = frames_of(columns)
    for name in shards_of(store.paths, owner):
        store.counts.opens += 2
        try:
            with OpenShard(store.paths, name) as shard:
                for offset, header in _candidates(store.paths, shard, ref):
                    data = shard.frames_at(offset, header, kinds)
                    if data is not None:
                        return stored_record(Place(name, offset), header, columns, data)
        except OSError as error:
            if error.errno not in GONE:
                raise
    return None


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
