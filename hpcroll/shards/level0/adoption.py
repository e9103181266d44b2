"""An index of a dead worker's shards: the committed records that its commit logs do not mark."""

from __future__ import annotations

from pathlib import Path

from hpcroll.fs.atomic import publish, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.commit_log import RecordAddress, pack_mark
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.run_facts import read_run_facts
from hpcroll.shards.level0.scan import records_of, shards_of
from hpcroll.shards.level0.shard_file import OpenShard, committer, marks_of


def adopt(paths: RunPaths, incarnation_id: str) -> int:
    """Publishes where the committed records of `incarnation_id` lie that no mark names; returns how many.

    Repeatable, and harmless beside other adopters and beside an owner that was only paused: the index
    holds facts that stay true, each published under a name of its own, and the owner's files are not
    touched. A record whose bytes are not as written is left out.
    """
    leg = read_run_facts(paths).final_leg
    return sum(_adopt_shard(paths, leg, name) for name in shards_of(paths, incarnation_id))


def _adopt_shard(paths: RunPaths, leg: str, name: ShardName) -> int:
    while True:
        unmarked = _unmarked(paths, leg, name)
        if not unmarked:
            return 0
        index = b"".join(pack_mark(address) for address in unmarked)
        if publish(_next_adoption(paths, name), index):
            return len(unmarked)
        # Another adopter took that name first: what it published may be all there is.


def _unmarked(paths: RunPaths, leg: str, name: ShardName) -> list[RecordAddress]:
    marked = marks_of(paths, name)
    try:
        opened = OpenShard(paths, name)
    except FileNotFoundError:
        return []  # packed, and removed meanwhile: the packs' index names its records
    with opened as shard:
        return [
            RecordAddress(
                name.index, offset, header.record_bytes, header.ref, header.attempt, header.checksum
            )
            for offset, header in records_of(shard)
            if offset not in marked
            and committer(paths, leg, header.ref) == name.incarnation
            and shard.frames_at(offset, header) is not None
        ]


def _next_adoption(paths: RunPaths, name: ShardName) -> Path:
    generation = 0
    while read_fresh(path := paths.adoption_file(name.incarnation, name.index, generation)) is not None:
        generation += 1
    return path
