"""Random histories of a run: every committed record is read exactly once, and nothing else is.

In any order: workers that race, crash and lose what they had not synced, packers, retention, followers that
resume or stop in the middle. `HPCROLL_HISTORIES=1000` tries as many, other ones each time.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcroll.contract import Trajectory
from hpcroll.shards import RecordAddress, RunReader, ShardWriter, adopt, open_run, verify_run
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from tests.shard_runs import ShardRun, ref, trajectory

GROUPS = 8
GROUP_SIZE = 2
SHARD_BYTES = 8_000
"""A few records."""
EXAMPLES = int(os.environ.get("HPCROLL_HISTORIES", "20"))


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


@dataclass(frozen=True)
class Step:
    """One thing that happens; each kind of step takes of the choices what it needs."""

    kind: str
    which: int
    group: int
    sample: int
    flag: bool
    share: float
    looks: dict[int, int | None]
    """Followers that look afterwards, and after how many deliveries each stops."""


KINDS = 4 * ["append"] + 4 * ["commit"] + 4 * ["pack"] + 2 * ["look"] + ["crash", "seal", "retain"]
STEPS = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    which=st.integers(0, 1),
    group=st.integers(0, GROUPS - 1),
    sample=st.integers(0, GROUP_SIZE + 1),
    flag=st.booleans(),
    share=st.floats(0, 1),
    looks=st.dictionaries(st.integers(0, 2), st.none() | st.integers(1, 3), max_size=2),
)


class History:
    """A run with two workers, two packers and three followers."""

    def __init__(self, root: Path) -> None:
        self.run = ShardRun.create(root / "run")
        self.count = 0
        self.alive = [self._start(), self._start()]
        self.unburied: list[str] = []
        self.packers = [
            Packer(self.run.paths, PackOptions(float16=float16, everything=everything))
            for float16, everything in ((False, False), (True, True))
        ]
        self.followers = [
            Follower(self.run, resumes=False, columns=None),
            Follower(self.run, resumes=True, columns=("tokens",)),
            Follower(self.run, resumes=True, columns=()),
        ]
        self.retention = Retention(self.run.paths)

    def take(self, step: Step) -> None:
        getattr(self, step.kind)(step)
        for which, most in step.looks.items():
            self.followers[which].look(most)
        self.assert_nothing_twice()

    def append(self, step: Step) -> None:
        """One rollout, or all of a group; followers may see it before anybody commits it."""
        first = step.group * GROUP_SIZE
        whole = range(first, first + GROUP_SIZE)
        for ordinal in whole if step.sample >= GROUP_SIZE else (first + step.sample,):
            self.alive[step.which].append(ordinal)

    def commit(self, step: Step) -> None:
        self.alive[step.which].commit(mark=step.flag)

    def crash(self, step: Step) -> None:
        """A worker dies with what it had not synced; another one comes."""
        self.alive[step.which].crash(step.share, zeros=step.flag)
        self.unburied.append(self.alive[step.which].name)
        self.alive[step.which] = self._start()

    def seal(self, step: Step) -> None:
        for name in self.unburied:
            self.run.end(name)
            adopt(self.run.paths, name)
        self.unburied = []

    def pack(self, step: Step) -> None:
        """The one that takes whole groups, more often than the one that takes everything."""
        self.packers[step.which and step.flag].pack()
        if step.flag:
            self.retention.retain()

    def retain(self, step: Step) -> None:
        Retention(self.run.paths).retain()

    def look(self, step: Step) -> None:
        """Nothing but what follows every step."""

    def end(self) -> None:
        """Everybody dies, and all is sealed, packed and removed; nothing is lost on the way."""
        self.assert_read_once()
        for worker in self.alive:
            worker.crash(0.5, zeros=False)
            self.unburied.append(worker.name)
        self.alive = []
        self.assert_read_once()
        for name in self.unburied:
            self.run.end(name)
            adopt(self.run.paths, name)
        self.assert_read_once()
        Packer(self.run.paths, PackOptions(everything=True)).pack()
        Retention(self.run.paths).retain()
        self.assert_read_once()

    def close(self) -> None:
        for worker in self.alive:
            worker.writer.close()

    def _start(self) -> Worker:
        self.count += 1
        return Worker(self.run, f"w{self.count}")

    def committed(self) -> set[tuple[int, str]]:
        directory = self.run.paths.done_directory(self.run.leg, ref(0))
        return {(int(p.name), json.loads(p.read_bytes())["incarnation"]) for p in directory.glob("*")}

    def assert_nothing_twice(self) -> None:
        done = self.committed()
        for follower in self.followers:
            assert all(count == 1 for count in follower.had.values())
            assert set(follower.had) <= done

    def assert_read_once(self) -> None:
        done = self.committed()
        for follower in self.followers:
            follower.look()
            assert set(follower.had) == done
        self.assert_nothing_twice()
        for trusted in (False, True):
            reader = open_run(self.run.paths.root, trust_marks=trusted, columns=())
            assert sorted((item.ref.ordinal, item.incarnation) for item in reader) == sorted(done)
            assert reader.counts.committed_lost == 0
        report = verify_run(self.run.paths.root)
        assert (report.problems, report.lost, report.committed) == ([], 0, len(done))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="HPCROLL_HISTORIES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(STEPS, min_size=30, max_size=60))
def test_every_committed_record_is_read_once_whatever_happens(steps: list[Step]) -> None:
    with TemporaryDirectory(prefix="history-") as root:
        history = History(Path(root))
        try:
            for step in steps:
                history.take(step)
            history.end()
        finally:
            history.close()
