"""SIGKILL at every system call of writer, committer, packer and retention: each committed record is read
exactly once, by a follower that lives through it and by a fresh reader; nothing else is."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hpcroll.shards import RunReader, adopt, open_run, verify_run
from hpcroll.shards.level1.packer import Packer
from hpcroll.shards.level1.retention import Retention
from tests.faults.instants import killed_at
from tests.shard_runs import SEGMENT, ShardRun, ref, trajectory

ROLLOUTS = 8
"""Two groups of four."""
STRIDE = int(os.environ.get("HPCROLL_INSTANT_STRIDE", "7"))
"""Every so many-th instant is tried; 1 tries all."""


def committed(run: ShardRun) -> dict[int, str]:
    """Who committed what, straight from the names."""
    directory = run.paths.done_directory(run.leg, ref(0))
    return {int(path.name): json.loads(path.read_bytes())["incarnation"] for path in directory.glob("*")}


def commit_some(run: ShardRun, incarnation: str, most: int) -> None:
    """Commits up to `most` rollouts that have no result, the last one without its mark, and ends."""
    done = committed(run)
    todo = [n for n in range(ROLLOUTS) if n not in done]
    with run.writer(incarnation) as writer:
        run.commit(writer, incarnation, todo[: most - 1], turns=1)
        run.commit(writer, incarnation, todo[most - 1 : most], turns=1, mark=False)
    run.end(incarnation)


def work(run: ShardRun, name: str) -> None:
    """Everything that ever writes to shards, in turn, until all is committed, packed and removed."""
    commit_some(run, f"{name}0", 5)
    adopt(run.paths, f"{name}0")
    Packer(run.paths).pack()
    commit_some(run, f"{name}1", 3)
    Packer(run.paths).pack()
    Retention(run.paths).retain()


def bury(run: ShardRun) -> None:
    """Says that every incarnation is gone, and indexes what each committed, as sealing does."""
    for path in list(run.paths.workers.glob("*.json")):
        run.end(path.stem)
        adopt(run.paths, path.stem)


class Follower:
    """A follower that lives through it all."""

    def __init__(self, run: ShardRun, *, resumes: bool) -> None:
        self._run = run
        self._resumes = resumes
        self._reader = self._open()
        self.had: list[tuple[int, str]] = []

    def _open(self) -> RunReader:
        return open_run(self._run.paths.root).follow(poll_s=0.01, stop=lambda: True)

    def look(self) -> None:
        if self._resumes:
            state = json.loads(json.dumps(self._reader.state_dict()))
            self._reader = self._open()
            self._reader.load_state_dict(state)
        for item in self._reader:
            expected = trajectory(item.ref.ordinal, incarnation=item.incarnation, turns=1)
            assert item.record == expected.record
            self.had.append((item.ref.ordinal, item.incarnation))


def assert_read_once(run: ShardRun, followers: list[Follower]) -> None:
    done = sorted(committed(run).items())
    for trusted in (False, True):
        reader = open_run(run.paths.root, trust_marks=trusted, columns=())
        assert sorted((item.ref.ordinal, item.incarnation) for item in reader) == done
        assert reader.counts.committed_lost == 0
    for follower in followers:
        follower.look()
        assert sorted(follower.had) == done
    assert verify_run(run.paths.root).problems == []


def instants() -> Iterator[int]:
    return itertools.count(1 + random.Random(21).randrange(STRIDE), STRIDE)


def test_killed_at_any_system_call_loses_and_doubles_nothing(tmp_path: Path) -> None:
    tried = 0
    for instant in instants():
        run = ShardRun.create(tmp_path / f"run{instant}")
        followers = [Follower(run, resumes=resumes) for resumes in (False, True)]
        killed = killed_at(instant, run.paths.root, partial(work, run, "a"))
        assert_read_once(run, followers)
        bury(run)
        assert_read_once(run, followers)
        work(run, "b")
        bury(run)
        assert_read_once(run, followers)
        assert len(committed(run)) == ROLLOUTS
        tried += 1
        if not killed:
            break
    assert tried * STRIDE > 150, "each of them an instant to die at"


Step = Callable[[ShardRun], object]


@pytest.mark.parametrize(
    "step", [lambda run: Packer(run.paths).pack(), lambda run: Retention(run.paths).retain()]
)
def test_another_packer_or_retention_at_once_changes_nothing(tmp_path: Path, step: Step) -> None:
    """The killed one's twin begins before it, and goes on after its death, from what it knew."""
    for instant in instants():
        run = ShardRun.create(tmp_path / f"run{instant}")
        commit_some(run, "a0", 8)
        twin_packer, twin_retention = Packer(run.paths), Retention(run.paths)
        followers = [Follower(run, resumes=False)]
        followers[0].look()
        killed = killed_at(instant, run.paths.root, partial(_pack_and, run, step))
        twin_packer.pack()
        assert_read_once(run, followers)
        twin_retention.retain()
        assert_read_once(run, followers)
        if not killed:
            break


def _pack_and(run: ShardRun, step: Step) -> None:
    Packer(run.paths).pack()
    step(run)


def test_segment_of_the_tests_is_a_whole_number_of_groups() -> None:
    groups = {trajectory(n, turns=1).record.group_id for n in range(ROLLOUTS)}
    assert len(groups) == 2, SEGMENT
