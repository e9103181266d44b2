"""Writers, followers, a packer and retention at once, as processes, for a while: all of them left alone, and
all of them killed at random instants. Both followers get every committed group once, in bounded memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from hpcroll.fs import publish
from hpcroll.shards import adopt, open_run, verify_run
from tests.faults.shard_process import GROUP_SIZE, POLL_S
from tests.shard_runs import SEGMENT, ShardRun, ref

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 240.0
SHORT_S = float(os.environ.get("HPCROLL_SOAK_S", "12"))
MOST_GROWTH_KB = 25_000
MOST_RSS_KB = 250_000
MOST_FILES = 24


class Site:
    """The processes of one test by name; all of them are dead when the block ends."""

    def __init__(self, run: ShardRun, *, writers: int, rate: float, every: int) -> None:
        self.run = run
        self.writers = writers
        self._rate = rate
        self._every = every
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._incarnations: dict[str, str] = {}
        self._count = 0

    @property
    def names(self) -> list[str]:
        return [*(f"writer{n}" for n in range(self.writers)), "packer", "retention", "plans", "groups"]

    def start(self, name: str) -> None:
        role = name.rstrip("0123456789")
        arguments: list[str] = []
        if role == "writer":
            self._count += 1
            self._incarnations[name] = f"w{self._count}"
            arguments = [f"w{self._count}", name.removeprefix(role), str(self.writers), str(self._rate)]
        elif role in ("plans", "groups"):
            arguments = [str(self.output(role)), str(self._every)]
        argv = [sys.executable, "-m", "tests.faults.shard_process", role, str(self.run.paths.root)]
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen([*argv, *arguments], stdout=log, stderr=log, cwd=CHECKOUT)

    def kill(self, name: str) -> None:
        """SIGKILL; of a writer, the parent then says that it is gone."""
        self.processes[name].kill()
        self.processes[name].wait(PATIENCE_S)
        if name in self._incarnations:
            self.run.end(self._incarnations[name])
            adopt(self.run.paths, self._incarnations[name])

    def finish(self) -> None:
        """Has the writers complete the groups they began, closes the run, waits for everybody."""
        writers = [name for name in self.names if name in self._incarnations]
        publish(self.run.paths.logs / "pause", b"")
        logs = [self.log(name) for name in writers]
        wait_until(
            lambda: all("paused" in log.read_text() for log in logs), "writers pause", self.require_alive
        )
        most = 1 + max(self.committed(), default=0)
        until = -(-most // GROUP_SIZE) * GROUP_SIZE
        publish(self.run.paths.logs / "until", str(until).encode())
        for name in (*writers, "close", "packer", "retention", "plans", "groups"):
            if name == "close":
                publish(self.run.paths.closed, b"{}")
                continue
            assert self.processes[name].wait(PATIENCE_S) == 0, self.log(name).read_text()[-2000:]
            if name in self._incarnations:
                self.run.end(self._incarnations[name])

    def require_alive(self) -> None:
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended: {self.log(name).read_text()[-2000:]}"

    def committed(self) -> set[int]:
        folder = self.run.paths.done_directory(self.run.leg, ref(0)).parent
        return {int(path.name) for path in folder.glob("*/*")}

    def lines(self, role: str) -> list[dict[str, Any]]:
        path = self.output(role)
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def output(self, role: str) -> Path:
        return self.run.paths.logs / f"{role}.jsonl"

    def log(self, name: str) -> Path:
        return self.run.paths.logs / f"{name}.log"

    def __enter__(self) -> Self:
        for name in self.names:
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], what: str, meanwhile: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"gave up waiting until {what}"
        meanwhile()
        time.sleep(0.05)


def assert_every_group_once(site: Site) -> None:
    done = site.committed()
    groups = {f"{SEGMENT}/g{ordinal // GROUP_SIZE}" for ordinal in done}
    assert len(done) == GROUP_SIZE * len(groups), "every group that was begun is complete"
    for role in ("plans", "groups"):
        had = [group for line in site.lines(role) for group in line["groups"]]
        assert len(had) == len(set(had)), role
        assert set(had) == groups, role
    assert len(list(open_run(site.run.paths.root, columns=()))) == len(done)


def soak(run: ShardRun, duration_s: float, *, rate: float) -> dict[str, Any]:
    """Ten writers, two followers, a packer and retention for `duration_s`; figures of the followers."""
    site = Site(run, writers=10, rate=rate, every=20)
    with site:
        wait_until(lambda: all(map(site.lines, ("plans", "groups"))), "both followers go", site.require_alive)
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            site.require_alive()
            time.sleep(0.1)
        wait_until(
            lambda: b"deleted" in site.log("retention").read_bytes(), "a shard went", site.require_alive
        )
        site.finish()
    assert_every_group_once(site)
    deleted = site.log("retention").read_text().count("deleted")
    packs = site.log("packer").read_text().count("packed")
    found: dict[str, Any] = {"rollouts": len(site.committed()), "packs": packs, "deleted": deleted}
    for role in ("plans", "groups"):
        lines = site.lines(role)
        figures = [line["figures"] for line in lines]
        sizes = [figure["rss_kb"] for figure in figures]
        last = figures[-1]
        found[role] = {
            **last,
            "growth_kb": max(sizes) - sizes[len(sizes) // 3],
            "state": len(json.dumps(lines[-1])),
        }
        assert max(sizes) - sizes[len(sizes) // 3] < MOST_GROWTH_KB, sizes
        assert max(sizes) < MOST_RSS_KB, sizes
        assert last["files"] < MOST_FILES
        # One listing per poll interval and directory, whatever is committed meanwhile.
        assert last["listings"] < 20 + 3 * last["s"] / POLL_S
    return found


def test_ten_writers_two_followers_a_packer_and_retention_at_once(tmp_path: Path) -> None:
    run = ShardRun.create(tmp_path / "run")
    soak(run, SHORT_S, rate=8)
    report = verify_run(run.paths.root)
    assert (report.problems, report.lost) == ([], 0)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_same_for_five_minutes(tmp_path: Path) -> None:
    run = ShardRun.create(tmp_path / "run")
    print(json.dumps(soak(run, 300.0, rate=4), indent=1))
    report = verify_run(run.paths.root)
    assert (report.problems, report.lost) == ([], 0)


def test_everybody_killed_at_random_instants(tmp_path: Path) -> None:
    chance = random.Random(31)
    run = ShardRun.create(tmp_path / "run")
    site = Site(run, writers=3, rate=40, every=1)
    with site:
        for _ in range(int(os.environ.get("HPCROLL_KILLS", "12"))):
            goal = len(site.committed()) + chance.randrange(4, 40)
            wait_until(lambda n=goal: len(site.committed()) >= n, "more is committed", site.require_alive)  # type: ignore[misc]
            victim = chance.choice(site.names)
            time.sleep(chance.random() * 0.2)  # not for anything to happen: any instant will do
            site.kill(victim)
            site.start(victim)
        site.finish()
    assert_every_group_once(site)
    report = verify_run(run.paths.root)
    assert (report.problems, report.lost) == ([], 0)
