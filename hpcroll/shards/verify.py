"""Checks a run's shards from end to end: bytes, invariants, and that `done` and the records agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcroll.contract import RolloutRef, Trajectory
from hpcroll.contract.invariants import check
from hpcroll.errors import HpcrollError, ShardError
from hpcroll.fs.atomic import list_names, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import decode_trajectory
from hpcroll.shards.format.commit_log import parse_marks
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.run_facts import RunFacts, read_run_facts
from hpcroll.shards.format.stored import ALL_COLUMNS
from hpcroll.shards.level0.scan import records_of
from hpcroll.shards.level0.shard_file import OpenShard, committer, is_finished, list_shards, marks_of
from hpcroll.shards.reading.lookup import find_committed

_MOST_FINDINGS = 1000


@dataclass(slots=True)
class VerifyReport:
    """What `verify_run` found. `problems` name what breaks a promise; the counts are for people."""

    shards: int = 0
    done: int = 0
    committed: int = 0
    """Records that `done` confirms and whose every byte is as written."""
    superseded: int = 0
    """Records of attempts that lost."""
    unconfirmed: int = 0
    """Records of rollouts that nobody has committed."""
    unmarked: int = 0
    """Committed records without a mark; readers find them by scanning."""
    torn_bytes: int = 0
    """Bytes that hold no sound record and that `done` does not miss."""
    action_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    problems_left_off: int = 0

    @property
    def ok(self) -> bool:
        """Whether every promise holds."""
        return not self.problems

    def add(self, problem: str) -> None:
        """Notes a problem; beyond the first thousand they are only counted."""
        if len(self.problems) < _MOST_FINDINGS:
            self.problems.append(problem)
        else:
            self.problems_left_off += 1


def verify_run(path: str | Path) -> VerifyReport:
    """Reads everything of the run at `path`; raises `ShardError` only where there is no run.

    A problem is: a committed record that is missing, damaged or there twice; a record that breaks an
    invariant or does not say what its place says; a mark that `done` does not confirm. Torn bytes after a
    kill, records of losing attempts and missing marks are normal and only counted.
    """
    paths = RunPaths(Path(path))
    return _Verification(paths, read_run_facts(paths)).run()


class _Verification:
    def __init__(self, paths: RunPaths, facts: RunFacts) -> None:
        self._paths = paths
        self._facts = facts
        self._report = VerifyReport()
        self._found: Counter[tuple[str, int]] = Counter()
        """Committed records by rollout; compact, since a run has many."""

    def run(self) -> VerifyReport:
        for name in list_shards(self._paths):
            self._report.shards += 1
            self._check_shard(name)
        for ref in self._done():
            self._report.done += 1
            self._check_done(ref)
        return self._report

    def _check_shard(self, name: ShardName) -> None:
        finished = is_finished(self._paths, name)
        marks = marks_of(self._paths, name)
        self._check_log(name)
        accounted = 0
        with OpenShard(self._paths, name) as shard:
            for offset, header in records_of(shard):
                whole = shard.read(offset, header.record_bytes)
                where = f"{shard.path}@{offset}"
                mark = marks.pop(offset, None)
                if mark is not None and (mark.ref, mark.checksum) != (header.ref, header.checksum):
                    self._report.add(f"{where}: its mark is of another record, of rollout {mark.ref}")
                if self._check_record(name, header, whole, where, marked=mark is not None):
                    accounted += header.record_bytes
            if finished:
                self._report.torn_bytes += shard.size - accounted
        for mark in marks.values():
            self._report.add(f"{name}: rollout {mark.ref} is marked at {mark.offset}, where no record stands")

    def _check_log(self, name: ShardName) -> None:
        data = read_fresh(self._paths.commit_log(name.incarnation, name.index))
        damaged = parse_marks(data)[1] if data is not None else 0
        if damaged:
            self._report.add(
                f"{self._paths.commit_log(name.incarnation, name.index)}: {damaged} damaged marks"
            )

    def _check_record(
        self, name: ShardName, header: Header, data: bytes, where: str, *, marked: bool
    ) -> bool:
        """Whether the record is whole; notes what it breaks."""
        owner = committer(self._paths, self._facts.final_leg, header.ref)
        committed = owner == name.incarnation
        if marked and not committed:
            self._report.add(f"{where}: rollout {header.ref} is marked, but `done` names {owner or 'nobody'}")
        try:
            trajectory = decode_trajectory(data)
        except HpcrollError as error:
            if committed:
                self._report.add(f"{where}: committed rollout {header.ref}: {error}")
            return False
        except ValueError as error:  # sound bytes that are no record: a writer's fault, not the disk's
            self._report.add(f"{where}: rollout {header.ref} does not decode: {error}")
            return True
        self._count(header, trajectory, owner, committed=committed, marked=marked)
        for problem in self._broken_promises(name, header, trajectory):
            self._report.add(f"{where}: rollout {header.ref}: {problem}")
        return True

    def _count(
        self, header: Header, trajectory: Trajectory, owner: str | None, *, committed: bool, marked: bool
    ) -> None:
        report = self._report
        if committed:
            report.committed += 1
            report.unmarked += not marked
            report.action_tokens += trajectory.action_tokens
            self._found[header.ref.segment, header.ref.ordinal] += 1
        elif owner is None:
            report.unconfirmed += 1
        else:
            report.superseded += 1

    def _broken_promises(self, name: ShardName, header: Header, trajectory: Trajectory) -> Iterator[str]:
        record = trajectory.record
        said = (record.rollout_id, record.attempt, record.incarnation)
        stands = (header.ref.rollout_id, header.attempt, name.incarnation)
        if said != stands:
            yield f"the record says {said}, its place says {stands}"
        if record.run_id != self._facts.run_id:
            yield f"the record is of run {record.run_id}, not {self._facts.run_id}"
        yield from check(trajectory, allow_shaped_logprobs=self._facts.allow_shaped_logprobs)

    def _done(self) -> Iterator[RolloutRef]:
        """Every rollout that `done` names, one directory listing at a time."""
        leg = self._paths.done / self._facts.final_leg
        for segment in sorted(list_names(leg)):
            for fanout in sorted(list_names(leg / segment)):
                for ordinal in list_names(leg / segment / fanout):
                    if ordinal.isdecimal():
                        yield RolloutRef(segment=segment, ordinal=int(ordinal))

    def _check_done(self, ref: RolloutRef) -> None:
        count = self._found[ref.segment, ref.ordinal]
        if count > 1:
            self._report.add(f"rollout {ref} has {count} committed records")
        elif count == 0:
            try:
                # A run that goes on may have committed it after its shard was read.
                find_committed(self._paths, self._facts.final_leg, ref, ALL_COLUMNS)
                self._report.committed += 1
            except ShardError as error:
                self._report.add(str(error))
