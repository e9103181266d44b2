"""Deletes level-0 shards that packs hold wholly and that no follower still reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.run_facts import read_run_facts
from hpcroll.shards.level0.scan import records_of
from hpcroll.shards.level0.shard_file import OpenShard, committer, is_finished, is_there, list_shards
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.cursors import Cursor, Cursors
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.level1.packer import remove_orphans


@dataclass(slots=True)
class RetainReport:
    """What retention did, or would do. Shards by name; `kept` says why each of the others stays."""

    deleted: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Damaged packs, and cursors that cannot be read; whoever relies on them keeps its shards."""
    orphans: int = 0
    """Data files of packers that died, removed."""


class Retention:
    """Retention of one run; any number may run at once, beside packers, workers and readers.

    A shard is deleted once its owner never writes it again, packs hold every committed record of it byte for
    byte as it was read when it was packed, every byte of those packs was checked by this object, and no
    unexpired cursor needs it. Killed at any moment, it leaves a shard that is whole, maybe without its index.
    """

    def __init__(self, paths: RunPaths, *, cursors: Cursors | None = None) -> None:
        """Raises `ShardError` where there is no run at `paths`."""
        self._paths = paths
        self._leg = read_run_facts(paths).final_leg
        self._chain = PackChain(paths)
        self._cursors = cursors or Cursors(paths)
        self._sound: set[int] = set()
        """Packs of which every byte was checked."""

    def retain(self, *, dry_run: bool = False, without: Collection[str] = ()) -> RetainReport:
        """Deletes what may go (with `dry_run` only says so); `without` names trainers whose cursor does not
        count."""
        report = RetainReport()
        self._chain.refresh()
        cursors, unreadable = self._cursors.unexpired(without=without)
        report.problems += [f"{self._paths.reader_cursor(trainer)} cannot be read" for trainer in unreadable]
        candidates = self._candidates(cursors, unreadable, report)
        held = self._held(candidates, report)
        stopped: set[str] = set()
        for name in candidates:
            reason = self._missing(name, held) if name.incarnation not in stopped else "an earlier one stays"
            if reason:
                stopped.add(name.incarnation)  # numbers go in order: the next one's log says "finished"
                report.kept[str(name)] = reason
                continue
            report.freed_bytes += self._size(name)
            report.deleted.append(str(name))
            if not dry_run:
                self._delete(name)
        if not dry_run:
            report.orphans = remove_orphans(self._paths, self._chain)
        return report

    def _candidates(
        self, cursors: Collection[Cursor], unreadable: Collection[str], report: RetainReport
    ) -> list[ShardName]:
        packed_by = {name: m.generation for m in self._chain for name in m.inputs}
        found: list[ShardName] = []
        stopped: set[str] = set()
        for name in list_shards(self._paths):
            if name.incarnation in stopped:
                reason = "an earlier one stays"
            elif unreadable:
                reason = f"the cursor of {', '.join(unreadable)} cannot be read"
            else:
                reason = self._why_not(name, cursors, packed_by)
            if reason:
                stopped.add(name.incarnation)
                report.kept[str(name)] = reason
            else:
                found.append(name)
        return found

    def _why_not(self, name: ShardName, cursors: Collection[Cursor], packed_by: dict[ShardName, int]) -> str:
        if name not in packed_by:
            return "no pack holds any of it"
        if not self._is_left_alone(name):
            return "its worker may still write it"
        frontier = self._chain.frontier(name)
        if frontier.pending:
            return f"{len(frontier.pending)} of its entries are not packed"
        if frontier.seen < self._size(name):
            return "packs hold only the first part of it"
        needed = [c.trainer for c in cursors if c.needs(name, end=frontier.seen, packed_by=packed_by[name])]
        return f"still read by {', '.join(needed)}" if needed else ""

    def _is_left_alone(self, name: ShardName) -> bool:
        """Whether the owner has no business with the shard any more: no write, no sync, no mark.

        A live owner that went on may still sync an attempt that lost, or mark one that won, into files that
        another node must not find gone; a whole shard later it has done so.
        """
        if is_there(self._paths.ended_file(name.incarnation)):
            return True
        following = ShardName(name.incarnation, name.index + 1)
        return is_finished(self._paths, name) and is_finished(self._paths, following)

    def _held(self, names: Iterable[ShardName], report: RetainReport) -> dict[ShardName, dict[int, int]]:
        """Per shard, the header checksums of the records that sound packs hold, by offset."""
        wanted = set(names)
        held: defaultdict[ShardName, dict[int, int]] = defaultdict(dict)
        for manifest in self._chain:
            touched = wanted & set(manifest.inputs)
            if not touched:
                continue
            with OpenPack(self._chain.data_file(manifest), manifest) as pack:
                if manifest.generation not in self._sound:
                    damage = pack.damage()
                    report.problems += damage
                    if damage or len(pack) != manifest.rows:
                        continue
                    self._sound.add(manifest.generation)
                for name in touched:
                    held[name] |= _records(pack, name)
        return held

    def _missing(self, name: ShardName, held: dict[ShardName, dict[int, int]]) -> str:
        """Which record of the shard is committed, or may be, and in no sound pack; empty where none is."""
        packed = held.get(name, {})
        with OpenShard(self._paths, name) as shard:
            for offset, header in records_of(shard):
                if packed.get(offset) == header.checksum:
                    continue
                owner = committer(self._paths, self._leg, header.ref)
                if owner is None or owner == name.incarnation:
                    return f"rollout {header.ref} at {offset} is in no sound pack"
        return ""

    def _size(self, name: ShardName) -> int:
        try:
            return self._paths.shard_file(name.incarnation, name.index).stat().st_size
        except FileNotFoundError:
            return 0

    def _delete(self, name: ShardName) -> None:
        # The index first, from its end: a mark without its record would look like damage, a record without
        # its mark is found by scanning.
        incarnation, index = name.incarnation, name.index
        generation = 0
        while read_fresh(self._paths.adoption_file(incarnation, index, generation)) is not None:
            generation += 1
        for number in reversed(range(generation)):
            self._paths.adoption_file(incarnation, index, number).unlink(missing_ok=True)
        self._paths.commit_log(incarnation, index).unlink(missing_ok=True)
        self._paths.shard_file(incarnation, index).unlink(missing_ok=True)


def _records(pack: OpenPack, name: ShardName) -> dict[int, int]:
    rows: NDArray[np.int64] = pack.rows_of_shard(name)
    return dict(zip(pack.rows.offset[rows].tolist(), pack.rows.checksum[rows].tolist(), strict=True))
