"""Checks the level-0 shards that are there: bytes, marks, invariants, and what `done` says of each record."""

from __future__ import annotations

from collections import Counter

from hpcroll.contract import RolloutRef, Trajectory
from hpcroll.errors import HpcrollError
from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import read_trajectory
from hpcroll.shards.format.commit_log import parse_marks
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.run_facts import RunFacts
from hpcroll.shards.level0.scan import records_of
from hpcroll.shards.level0.shard_file import OpenShard, committer, is_finished, list_shards, marks_of
from hpcroll.shards.verify.records import broken_promises
from hpcroll.shards.verify.report import VerifyReport


class Level0Check:
    """Goes once through every level-0 shard; a shard that is removed meanwhile is passed over."""

    def __init__(self, paths: RunPaths, facts: RunFacts, report: VerifyReport) -> None:
        self._paths = paths
        self._facts = facts
        self._report = report
        self.found: Counter[tuple[str, int]] = Counter()
        """Sound committed records by rollout; compact, since a run has many."""
        self.committed: dict[ShardName, dict[int, tuple[str, int]]] = {}
        """The rollouts of committed records, by shard and offset, damaged ones included."""
        self.present: set[ShardName] = set()

    def run(self) -> None:
        for name in list_shards(self._paths):
            try:
                self._check_shard(name)
            except FileNotFoundError:
                continue  # packed, and removed since it was listed

    def _check_shard(self, name: ShardName) -> None:
        finished = is_finished(self._paths, name)
        marks = marks_of(self._paths, name)
        self._check_log(name)
        accounted = 0
        with OpenShard(self._paths, name) as shard:
            self._report.shards += 1
            self.present.add(name)
            for offset, header in records_of(shard):
                whole = shard.read(offset, header.record_bytes)
                where = f"{shard.path}@{offset}"
                mark = marks.pop(offset, None)
                if mark is not None and (mark.ref, mark.checksum) != (header.ref, header.checksum):
                    self._report.add(f"{where}: its mark is of another record, of rollout {mark.ref}")
                if self._check_record(name, offset, header, whole, where, marked=mark is not None):
                    accounted += header.record_bytes
            if finished:
                self._report.torn_bytes += shard.size - accounted
        for mark in marks.values():
            self._report.add(f"{name}: rollout {mark.ref} is marked at {mark.offset}, where no record stands")

    def _check_log(self, name: ShardName) -> None:
        path = self._paths.commit_log(name.incarnation, name.index)
        generation = 0
        while (data := read_fresh(path)) is not None:
            damaged = parse_marks(data)[1]
            if damaged:
                self._report.add(f"{path}: {damaged} damaged marks")
            path = self._paths.adoption_file(name.incarnation, name.index, generation)
            generation += 1

    def _check_record(
        self, name: ShardName, offset: int, header: Header, data: bytes, where: str, *, marked: bool
    ) -> bool:
        """Whether the record is whole; notes what it breaks."""
        ref = header.ref
        owner = committer(self._paths, self._facts.final_leg, ref)
        committed = owner == name.incarnation
        if committed:
            self.committed.setdefault(name, {})[offset] = (ref.segment, ref.ordinal)
        if marked and not committed:
            self._report.add(f"{where}: rollout {ref} is marked, but `done` names {owner or 'nobody'}")
        try:
            trajectory = read_trajectory(header, data)
        except HpcrollError as error:
            if committed:
                self._report.add(f"{where}: committed rollout {ref}: {error}")
            return False
        except ValueError as error:  # sound bytes that are no record: a writer's fault, not the disk's
            self._report.add(f"{where}: rollout {ref} does not decode: {error}")
            return True
        self._count(ref, trajectory, owner, committed=committed, marked=marked)
        for problem in broken_promises(
            self._facts, trajectory, ref=ref, attempt=header.attempt, incarnation=name.incarnation
        ):
            self._report.add(f"{where}: rollout {ref}: {problem}")
        return True

    def _count(
        self, ref: RolloutRef, trajectory: Trajectory, owner: str | None, *, committed: bool, marked: bool
    ) -> None:
        if committed:
            self._report.unmarked += not marked
            self._report.action_tokens += trajectory.action_tokens
            self.found[ref.segment, ref.ordinal] += 1
        elif owner is None:
            self._report.unconfirmed += 1
        else:
            self._report.superseded += 1
