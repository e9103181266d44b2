"""How long a commit takes to be durable, and until a reader that follows the run has it.

    python -m tests.benchmarks.shards_commits RAW FOLDER

Threads encode trajectories and hand them in as rollouts end in a worker; one committer appends what came in
within its window, syncs, links `done` and marks, as the worker's does. A process follows the run as a trainer
does.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcroll.config import ShardConfig
from hpcroll.contract import Trajectory
from hpcroll.fs.atomic import fsync_directory
from hpcroll.shards import open_run
from hpcroll.shards.level0.writer import PreparedRecord
from tests.benchmarks.shards_ours import BenchRun, trajectory_of
from tests.benchmarks.shards_rawset import RawSet

_THREADS = 8
_MOST = 400
"""Trajectories."""
_PAUSE_S = 0.3
"""Mean time between two rollouts that one thread hands in."""


@dataclass(eq=False)
class _HandedIn:
    record: PreparedRecord
    rollout_id: str
    at_s: float
    done: threading.Event = field(default_factory=threading.Event)
    durable_s: float = 0.0
    committed_s: float = 0.0


class _Committer:
    """Group commit as the worker's: append, sync, link, sync the directories, mark."""

    def __init__(self, run: BenchRun) -> None:
        self._run = run
        self._window_s = ShardConfig().commit_window_s
        self._writer = run.writer()
        self._waiting: list[_HandedIn] = []
        self._news = threading.Condition()
        self._over = False
        self.items: list[_HandedIn] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def commit(self, trajectory: Trajectory) -> None:
        at_s = time.monotonic()
        record = self._writer.prepare(trajectory)
        item = _HandedIn(record, trajectory.record.rollout_id, at_s)
        with self._news:
            self._waiting.append(item)
            self.items.append(item)
            self._news.notify()
        item.done.wait()

    def close(self) -> None:
        with self._news:
            self._over = True
            self._news.notify()
        self._thread.join()
        self._writer.close()
        self._run.close()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._over)
                if not self._waiting:
                    return
            time.sleep(self._window_s)
            with self._news:
                group, self._waiting = self._waiting, []
            self._commit(group)

    def _commit(self, group: Sequence[_HandedIn]) -> None:
        addresses = [self._writer.append(item.record) for item in group]
        self._writer.sync()
        durable_s = time.monotonic()
        for address in addresses:
            self._run.confirm(address.ref)
        for folder in {self._run.paths.done_directory(self._run.leg, address.ref) for address in addresses}:
            fsync_directory(folder)
        committed_s = time.monotonic()
        self._writer.mark(addresses)
        for item in group:
            item.durable_s, item.committed_s = durable_s, committed_s
            item.done.set()


def measure(raw: Path, folder: Path) -> dict[str, Any]:
    """Milliseconds, p50 and p99: until durable, until committed, and from there until a follower has it."""
    rows = RawSet.load(raw)
    step = max(1, len(rows) // _MOST)
    chosen = [trajectory_of(rows[index]) for index in range(0, len(rows), step)]
    run = BenchRun.create(folder / "commits")
    follower = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.shards_commits", "follow", str(run.paths.root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None, "asked for"
    follower.stdout.readline()
    committer = _Committer(run)
    threads = [
        threading.Thread(target=_hand_in, args=(committer, chosen[number::_THREADS], number))
        for number in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    committer.close()
    seen_s = dict(json.loads(line) for line in follower.stdout)
    follower.wait()
    if len(seen_s) != len(committer.items):
        raise SystemExit(f"the follower has {len(seen_s)} of {len(committer.items)} rollouts")
    items = committer.items
    visible_s = [seen_s[item.rollout_id] - item.committed_s for item in items]
    return {
        "commits": len(items),
        "durable_ms": _percentiles_ms([item.durable_s - item.at_s for item in items]),
        "committed_ms": _percentiles_ms([item.committed_s - item.at_s for item in items]),
        "visible_ms": _percentiles_ms(visible_s),
    }


def follow(root: Path) -> None:
    """Prints when each rollout was delivered, until the run is closed."""
    reader = open_run(root, columns=("tokens",)).follow()
    print("ready", flush=True)
    seen = [(stored.rollout_id, time.monotonic()) for stored in reader if stored.tokens]
    for one in seen:
        print(json.dumps(one))


def _hand_in(committer: _Committer, trajectories: Sequence[Trajectory], seed: int) -> None:
    rng = random.Random(seed)
    for trajectory in trajectories:
        time.sleep(rng.expovariate(1 / _PAUSE_S))
        committer.commit(trajectory)


def _percentiles_ms(values_s: Sequence[float]) -> list[float]:
    return (np.percentile(values_s, [50, 99]) * 1e3).tolist()


if __name__ == "__main__":
    if sys.argv[1] == "follow":
        follow(Path(sys.argv[2]))
    else:
        print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]))))
