"""Random access: the committed record of one rollout, or of each of a group, on whichever level it lies."""

from __future__ import annotations

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.fs.atomic import list_names
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.scan import shards_of
from hpcroll.shards.level0.shard_file import committer
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
    found = store.shards.read_marked(owner, ref, columns)
    if found is not None:
        return found
    for name in shards_of(store.paths, owner):
        store.counts.opens += 1
        try:
            found = store.shards.find(name, ref, columns, store.counts)
        except OSError as error:
            if error.errno not in GONE:
                raise
        if found is not None:
            return found
    return None
