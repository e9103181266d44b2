"""What trajectories take on disk, and how fast a trainer has them back, beside the formats it would use else.

    make bench-shards

Two sets, an imagined one and one captured from real agents, are written by hpcroll and by its peers, in the
same order, at zstd level 3, and read back by each format's own reader. Every measurement is a process of its
own. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from hpcroll.contract import Trajectory
from tests.benchmarks.shards_capture import DEFAULT_AGENTS, capture, captured
from tests.benchmarks.shards_child import OURS
from tests.benchmarks.shards_generator import GROUP_SIZE, trajectories
from tests.benchmarks.shards_measures import DAMAGED_ROWS, Measured, Measures
from tests.benchmarks.shards_rawset import RawWriter, save
from tests.benchmarks.shards_report import (
    FEWER,
    PEERS,
    describe_sets,
    goals,
    last_line,
    say_goals,
    table,
)
from tests.benchmarks.shards_statistics import Statistics, describe

PEERS_DIR = Path(os.environ.get("HPCROLL_TEST_SHARD_PEERS", "/var/lib/hpcroll-test/shard-peers"))
GROUPS = 256
_DESCRIBED_GROUPS = 24
_IMAGINED, _CAPTURED = "imagined", "captured"


class Bench:
    """The sets in one folder, and what was measured of each."""

    def __init__(self, folder: Path, peers: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._peers = peers
        self._say = say
        self.statistics: dict[str, Statistics] = {}
        self.measures: dict[str, Measures] = {}

    def add(self, name: str, rows: Iterable[Trajectory]) -> None:
        """Lays out a set; the first groups are described, the very first ones will be damaged."""
        began_s = time.perf_counter()
        folder = self._folder / name
        folder.mkdir()
        source = iter(rows)
        first = list(islice(source, _DESCRIBED_GROUPS * GROUP_SIZE))
        self.statistics[name] = describe(first)
        save(folder / "few", first[:DAMAGED_ROWS])
        writer = RawWriter(folder / "raw")
        for trajectory in first:
            writer.add(trajectory)
        del first
        for trajectory in source:
            writer.add(trajectory)
        writer.finish()
        self.measures[name] = Measures(folder, self._peers, self._say)
        self._say(f"set {name}: laid out in {time.perf_counter() - began_s:.0f} s")

    def measure(self, name: str, formats: Sequence[str], rounds: int) -> Measured:
        """Measures every format on a set, and prints the table."""
        began_s = time.perf_counter()
        self._say(f"writing the {name} set (ratio, MB/s):")
        damaged = self._folder / name / "few" if name == _IMAGINED else None
        measured = self.measures[name].run(formats, rounds=rounds, damaged=damaged)
        size_mb = measured.results[formats[0]].raw_bytes / 1e6
        self._say(f"\n{name}: {measured.rows} trajectories, {measured.tokens} tokens, {size_mb:.0f} MB raw")
        for line in table(measured):
            self._say(line)
        limit_mb_s = measured.tokens * 10 / min(measured.limit_s.values()) / 1e6
        self._say(f"zstd alone over the tokens, two frames a group: {limit_mb_s:,.0f} MB/s of them raw")
        self._say(f"measured in {time.perf_counter() - began_s:.0f} s\n")
        return measured


def measure(folder: Path, options: argparse.Namespace, say: Callable[[str], None]) -> str:
    """Prints the tables and returns the last line."""
    bench = Bench(folder, options.peers, say)
    bench.add(_IMAGINED, trajectories(options.groups))
    if options.agents:
        began_s = time.perf_counter()
        runs = options.captured or folder / "runs"
        runs.mkdir(exist_ok=True)
        capture(runs, agents=options.agents, groups=options.captured_groups)
        say(f"captured in {time.perf_counter() - began_s:.0f} s")
        bench.add(_CAPTURED, captured(runs))
    for line in describe_sets(bench.statistics):
        say(line)
    lines = []
    for name in bench.measures:
        peers = [key for key in PEERS if name == _IMAGINED or key not in FEWER]
        measured = bench.measure(name, (*OURS, *peers), options.rounds)
        commits = bench.measures[name].commits() if name == _IMAGINED else {}
        if commits:
            for what in ("durable", "committed", "visible"):
                p50, p99 = commits[f"{what}_ms"]
                say(f"{commits['commits']} commits, {what}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
            say_goals(goals(measured, commits), say)
        lines.append(last_line(measured, commits, "" if name == _IMAGINED else f"_{name}"))
    return " ".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"of 8, imagined (default {GROUPS})")
    parser.add_argument("--rounds", type=int, default=3, help="of reading (default 3)")
    parser.add_argument("--agents", nargs="*", default=DEFAULT_AGENTS, help="captured; none: no such set")
    parser.add_argument("--captured-groups", type=int, default=2, help="of 8, of each agent (default 2)")
    parser.add_argument("--captured", type=Path, help="folder where captured runs are kept for the next time")
    parser.add_argument("--peers", type=Path, default=PEERS_DIR, help=f"their environment ({PEERS_DIR})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcroll-bench-") as folder:
        print(measure(Path(folder), options, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
