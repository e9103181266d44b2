"""Random histories of a run: every committed record is read exactly once, and nothing else is.

In any order: workers that race, crash and lose what they had not synced, packers, retention, followers that
resume or stop in the middle. `HPCROLL_HISTORIES=1000` tries as many, other ones each time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from hpcroll.contract import Trajectory
from hpcroll.shards import RecordAddress, RunReader, ShardWriter, adopt, open_run, verify_run
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from tests.shard_runs import ShardRun, ref, trajectory

GROUPS = 5
GROUP_SIZE = 2
SHARD_BYTES = 8_000
"""A few records."""
EXAMPLES = int(os.environ.get("HPCROLL_HISTORIES", "60"))


def record_of(ordinal: int, incarnation: str) -> Trajectory:
    return trajectory(ordinal, incarnation=incarnation, turns=1, group_size=GROUP_SIZE)


class Worker:
    """One incarnation, as its own process sees it and as a crash leaves it."""

    def __init__(self, run: ShardRun, name: str) -> None:
        self.run = run
        self.name = name
        self.writer: ShardWriter = run.writer(name)
        self.writer._most_bytes = SHARD_BYTES
        self.appended: list[RecordAddress] = []
        self.durable: dict[Path, int] = {}

    def append(self, ordinal: int) -> None:
        if ordinal not in [address.ref.ordinal for address in self.appended]:
            self.appended.append(self.writer.append(record_of(ordinal, self.name)))

    def commit(self, *, mark: bool) -> None:
        """Commits all that it appended and that nobody has committed."""
        self.writer.sync()
        self.durable = {path: path.stat().st_size for path in self._shards()}
        won = [address for address in self.appended if self.run.confirm(address.ref.ordinal, self.name)]
        if mark:
            self.writer.mark(won)

    def crash(self, share: float, *, zeros: bool) -> None:
        """Of each file, what was not durable is lost but for a share; `zeros` stand in its place."""
        sizes = {path: path.stat().st_size for path in self._shards()}
        self.writer.close()
        for path, size in sizes.items():
            least = self.durable.get(path, 0)
            kept = least + int(share * (size - least))
            os.truncate(path, kept)
            if zeros:
                os.truncate(path, size)

    def _shards(self) -> list[Path]:
        return list(self.run.paths.shards.glob(f"{self.name}.*.shard"))


class Follower:
    """Follows, resuming from a saved state before each look, or going on as it is."""

    def __init__(self, run: ShardRun, *, resumes: bool, columns: tuple[str, ...] | None) -> None:
        self._run = run
        self._resumes = resumes
        self._columns = columns
        self._reader = self._open()
        self.had: Counter[tuple[int, str]] = Counter()

    def _open(self) -> RunReader:
        reader = open_run(self._run.paths.root, columns=self._columns)
        return reader.follow(poll_s=0.0001, stop=lambda: True)

    def look(self, most: int | None = None) -> None:
        """Takes what there is, or stops in the middle of it."""
        if self._resumes:
            state = json.loads(json.dumps(self._reader.state_dict()))
            self._reader = self._open()
            self._reader.load_state_dict(state)
        for item in self._reader:
            self.had[item.ref.ordinal, item.incarnation] += 1
            if most is not None and (most := most - 1) <= 0:
                break


Looks = dict[int, int | None]
LOOKS: st.SearchStrategy[Looks] = st.dictionaries(st.integers(0, 2), st.none() | st.integers(1, 3))
"""Which followers look, and after how many deliveries each stops."""
GROUP = st.integers(0, GROUPS - 1)


class History(RuleBasedStateMachine):
    workers = Bundle("workers")
    dead = Bundle("dead")
    packers = Bundle("packers")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="history-"))
        self.run = ShardRun.create(self.root / "run")
        self.alive: dict[str, Worker] = {}
        self.unburied: set[str] = set()
        self.count = 0
        self.followers = [
            Follower(self.run, resumes=False, columns=None),
            Follower(self.run, resumes=True, columns=("tokens",)),
            Follower(self.run, resumes=True, columns=()),
        ]
        self.retention = Retention(self.run.paths)

    @initialize(target=workers)
    def start_first(self) -> str:
        return self.start_one()

    @initialize(target=workers)
    def start_second(self) -> str:
        return self.start_one()

    @initialize(target=packers, float16=st.booleans())
    def start_first_packer(self, float16: bool) -> Packer:
        return Packer(self.run.paths, PackOptions(float16=float16))

    @rule(target=workers)
    @precondition(lambda self: len(self.alive) < 3)
    def start(self) -> str:
        return self.start_one()

    def start_one(self) -> str:
        name = f"w{self.count}"
        self.count += 1
        self.alive[name] = Worker(self.run, name)
        return name

    @rule(target=packers, float16=st.booleans(), everything=st.booleans())
    def start_packer(self, float16: bool, everything: bool) -> Packer:
        return Packer(self.run.paths, PackOptions(float16=float16, everything=everything))

    @rule(worker=workers, group=GROUP, sample=st.integers(0, GROUP_SIZE), looks=LOOKS)
    def append(self, worker: str, group: int, sample: int, looks: Looks) -> None:
        """One rollout, or all of a group; followers may see it before anybody commits it."""
        first = group * GROUP_SIZE
        whole = range(first, first + GROUP_SIZE)
        for ordinal in whole if sample == GROUP_SIZE else (first + sample,):
            self.alive[worker].append(ordinal)
        self.look(looks)

    @rule(worker=workers, mark=st.booleans(), looks=LOOKS)
    def commit(self, worker: str, mark: bool, looks: Looks) -> None:
        self.alive[worker].commit(mark=mark)
        self.look(looks)

    @rule(target=dead, worker=consumes(workers), share=st.floats(0, 1), zeros=st.booleans())
    def crash(self, worker: str, share: float, zeros: bool) -> str:
        self.alive.pop(worker).crash(share, zeros=zeros)
        self.unburied.add(worker)
        return worker

    @rule(worker=consumes(dead))
    def seal(self, worker: str) -> None:
        self.run.end(worker)
        self.unburied.discard(worker)
        adopt(self.run.paths, worker)

    @rule(packer=packers, looks=LOOKS, retain=st.booleans())
    def pack(self, packer: Packer, looks: Looks, retain: bool) -> None:
        packer.pack()
        if retain:
            self.retention.retain()
        self.look(looks)

    @rule()
    def retain_anew(self) -> None:
        Retention(self.run.paths).retain()

    @rule(looks=LOOKS)
    def look(self, looks: Looks) -> None:
        for which, most in looks.items():
            self.followers[which].look(most)

    @invariant()
    def nothing_is_read_twice_or_uncommitted(self) -> None:
        done = self.committed()
        for follower in self.followers:
            assert all(count == 1 for count in follower.had.values())
            assert set(follower.had) <= done

    def committed(self) -> set[tuple[int, str]]:
        directory = self.run.paths.done_directory(self.run.leg, ref(0))
        return {(int(p.name), json.loads(p.read_bytes())["incarnation"]) for p in directory.glob("*")}

    def teardown(self) -> None:
        try:
            for name, worker in self.alive.items():
                worker.crash(0.5, zeros=False)
                self.unburied.add(name)
            self.assert_read_once()
            for name in self.unburied:
                self.run.end(name)
                adopt(self.run.paths, name)
            self.assert_read_once()
            Packer(self.run.paths, PackOptions(everything=True)).pack()
            Retention(self.run.paths).retain()
            self.assert_read_once()
        finally:
            shutil.rmtree(self.root)

    def assert_read_once(self) -> None:
        done = self.committed()
        for follower in self.followers:
            follower.look()
            assert set(follower.had) == done
        self.nothing_is_read_twice_or_uncommitted()
        for trusted in (False, True):
            reader = open_run(self.run.paths.root, trust_marks=trusted, columns=())
            assert sorted((item.ref.ordinal, item.incarnation) for item in reader) == sorted(done)
            assert reader.counts.committed_lost == 0
        report = verify_run(self.run.paths.root)
        assert (report.problems, report.lost, report.committed) == ([], 0, len(done))


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
class TestHistory(History.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=50,
        deadline=None,
        derandomize="HPCROLL_HISTORIES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
