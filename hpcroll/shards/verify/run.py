"""Checks a run's shards from end to end: both levels, and that `done` and the records agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardError
from hpcroll.fs.atomic import list_names, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.dictionaries import parse_dictionaries
from hpcroll.shards.format.run_facts import RunFacts, read_run_facts
from hpcroll.shards.format.stored import ALL_COLUMNS
from hpcroll.shards.level0.walk import ReadCounts
from hpcroll.shards.reading.lookup import find_committed
from hpcroll.shards.reading.store import Store
from hpcroll.shards.verify.level0 import Level0Check
from hpcroll.shards.verify.level1 import Level1Check
from hpcroll.shards.verify.report import VerifyReport


def verify_run(path: str | Path) -> VerifyReport:
    """Reads everything of the run at `path`; raises `ShardError` only where there is no run.

    A problem is: a committed record that is missing, damaged, or there twice on one level; a record that
    breaks an invariant or does not say what its place says; a mark or a packed row that `done` does not
    confirm; a packed row that differs from its level-0 original; a byte of a pack that is not as written; a
    chain of packs with a gap, or one whose inputs do not follow each other or pass over a committed record.
    Torn bytes after a kill, records of losing attempts, missing marks and data files of dead packers are
    normal and only counted. Memory grows with the committed rollouts.
    """
    paths = RunPaths(Path(path))
    return _Verification(paths, read_run_facts(paths)).run()


class _Verification:
    def __init__(self, paths: RunPaths, facts: RunFacts) -> None:
        self._paths = paths
        self._facts = facts
        self._report = VerifyReport()
        self._store = Store(paths, ReadCounts())
        # In this order: a shard that is removed meanwhile was packed before.
        self._level0 = Level0Check(paths, facts, self._report)
        self._level1 = Level1Check(paths, facts, self._report)

    def run(self) -> VerifyReport:
        self._check_dictionaries()
        self._level0.run()
        self._level1.run()
        self._check_frontier()
        for ref in self._done():
            self._report.done += 1
            self._check_done(ref)
        return self._report

    def _check_dictionaries(self) -> None:
        """Each file of dictionaries stands twice, because all records that name one depend on it."""
        generation = 0
        while True:
            paths = [self._paths.dictionary_file(generation, copy=copy) for copy in (False, True)]
            contents = [read_fresh(path) for path in paths]
            if contents == [None, None]:
                return
            for path, data in zip(paths, contents, strict=True):
                if data is None:
                    self._report.add(f"{path} is missing; copy it from the other one")
                    continue
                try:
                    parse_dictionaries(data, path)
                except ShardError as error:
                    self._report.add(str(error))
            generation += 1

    def _check_frontier(self) -> None:
        """Every committed record that packs have passed must be in one: its shard may be removed."""
        chain = self._level1.chain
        for name, committed in self._level0.committed.items():
            packed = self._level1.offsets.get(name, set())
            for offset, (segment, ordinal) in committed.items():
                if offset not in packed and chain.frontier(name).holds(offset):
                    self._report.add(
                        f"{name}@{offset}: rollout {segment}/{ordinal} is committed, and packs have passed "
                        "it without holding it; keep this shard"
                    )
        for name in set(chain.shards()) - self._level0.present:
            self._report.removed_shards += 1
            if chain.frontier(name).pending:
                self._report.add(f"{name}: the shard is gone, and packs do not hold all of it")

    def _done(self) -> Iterator[RolloutRef]:
        """Every rollout that `done` names, one directory listing at a time."""
        leg = self._paths.done / self._facts.final_leg
        for segment in sorted(list_names(leg)):
            for fanout in sorted(list_names(leg / segment)):
                for ordinal in list_names(leg / segment / fanout):
                    if ordinal.isdecimal():
                        yield RolloutRef(segment=segment, ordinal=int(ordinal))

    def _check_done(self, ref: RolloutRef) -> None:
        key = (ref.segment, ref.ordinal)
        level0, level1 = self._level0.found[key], self._level1.found[key]
        if level0 > 1 or level1 > 1:
            more, where = (level0, "level 0") if level0 > 1 else (level1, "packs")
            self._report.add(f"rollout {ref} has {more} committed records in {where}")
        if level0 or level1:
            self._report.committed += 1
            self._report.action_tokens += 0 if level0 else self._level1.action_tokens[key]
            return
        try:
            # A run that goes on may have committed it after its shard was read.
            find_committed(self._store, self._facts.final_leg, ref, ALL_COLUMNS)
            self._report.committed += 1
        except (ShardError, OSError) as error:
            self._report.lost += 1
            self._report.add(f"rollout {ref} has no readable record: {error}")
