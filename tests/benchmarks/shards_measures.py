"""Runs every measurement of a set, each in a process of its own; the formats take turns in rounds."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.shards_child import OURS
from tests.benchmarks.shards_process import run_json

SLOW = frozenset({"jsonl", "webdataset"})
"""Read in the first round only, since a pass takes them longest and is far from the others."""
DAMAGED_ROWS = 32
"""Of the smaller set that is damaged over and over."""
_OTHER_SET_UPS = frozenset(
    {
        "packed_float16",
        "packed_default",
        "litdata_chunk",
        "array_record_1",
        "parquet_8",
        "parquet_8_dictionary",
        "parquet_64_dictionary",
        "parquet_64_planes",
        "parquet_64_planes_6",
    }
)
"""Damage is tried on one set-up of each format."""


@dataclass
class Result:
    """What was measured of one format; times in seconds, of each round."""

    key: str
    name: str = ""
    raw_bytes: int = 0
    stored_bytes: int = 0
    write_s: list[float] = field(default_factory=list)
    durable_ms: list[float] = field(default_factory=list)
    read_s: dict[str, dict[int, float]] = field(default_factory=lambda: {"tokens": {}, "full": {}})
    """By what was read, then by round."""
    memory_mb: float = 0.0
    random: dict[str, float] = field(default_factory=dict)
    damage: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.stored_bytes

    @property
    def write_mb_s(self) -> float:
        return self.raw_bytes / min(self.write_s) / 1e6

    def best_s(self, what: str) -> float:
        return min(self.read_s[what].values())


@dataclass
class Measured:
    """All results of a set, and zstd alone over the same columns, by round."""

    results: dict[str, Result] = field(default_factory=dict)
    limit_s: dict[int, float] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0

    def times_faster(self, key: str, others: Sequence[str], what: str = "tokens") -> float:
        """How many times as fast `key` reads as the fastest of `others`: the median of the rounds' ratios."""
        mine = self.results[key].read_s[what]
        ratios = []
        for number, seconds in mine.items():
            theirs = [
                self.results[other].read_s[what].get(number) for other in others if other in self.results
            ]
            ratios.append(min(each for each in theirs if each is not None) / seconds)
        return statistics.median(ratios)

    def share_of_limit(self, key: str) -> float:
        """zstd's time alone as a share of the format's: the median of the rounds' ratios."""
        mine = self.results[key].read_s["tokens"]
        return statistics.median(self.limit_s[number] / seconds for number, seconds in mine.items())


class Measures:
    """The processes that measure one set, in `folder`; the raw rows are in `folder`/raw."""

    def __init__(self, folder: Path, peers: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._peers = peers
        self._say = say
        self._scratch = folder / "tmp"
        self._scratch.mkdir()

    def run(self, formats: Sequence[str], *, rounds: int, damaged: Path | None) -> Measured:
        """Measures `formats`; `damaged` holds the smaller raw set that is damaged, if any is."""
        measured = Measured({key: Result(key) for key in formats})
        for key in formats:
            self._write(measured.results[key])
        for number in range(rounds):
            for key in formats:
                if number and key in SLOW:
                    continue
                self._read(measured, key, number)
            measured.limit_s[number] = self._ask("limit", "packed")["seconds"]
        for key in formats:
            found = self._ask("random", key)
            measured.results[key].random = {name: v for name, v in found.items() if name != "name"}
        for key in formats if damaged is not None else ():
            if key not in _OTHER_SET_UPS:
                measured.results[key].damage = self._damage(key, damaged)
        return measured

    def commits(self) -> dict[str, Any]:
        """Latencies of durable commits, see `shards_commits`."""
        argv = [sys.executable, "-m", "tests.benchmarks.shards_commits"]
        argv += [str(self._folder / "raw"), str(self._folder)]
        return run_json(argv, scratch=self._scratch)

    def _write(self, result: Result) -> None:
        found = self._ask("write", result.key)
        result.name = found["name"]
        result.raw_bytes, result.stored_bytes = found["raw_bytes"], found["stored_bytes"]
        result.write_s.append(found["seconds"])
        result.durable_ms = found.get("durable_ms", [])
        self._say(f"  {result.name}: {result.ratio:.2f}, {result.write_mb_s:.0f} MB/s")

    def _read(self, measured: Measured, key: str, number: int) -> None:
        result = measured.results[key]
        for what in ("tokens", "full"):
            found = self._ask(what, key)
            result.read_s[what][number] = found["seconds"]
            result.memory_mb = max(result.memory_mb, found["memory_mb"])
            measured.rows, measured.tokens = found["rows"], found["tokens"]

    def _damage(self, key: str, raw: Path) -> dict[str, float]:
        folder = self._folder / "damaged" / key
        self._ask("write", key, raw=raw, folder=folder)
        found = self._ask("damage", key, raw=raw, folder=folder)
        return {name: value for name, value in found.items() if name != "name"}

    def _ask(
        self, action: str, key: str, *, raw: Path | None = None, folder: Path | None = None
    ) -> dict[str, Any]:
        python = sys.executable if key in OURS else str(self._peers / "bin" / "python")
        argv = [python, "-m", "tests.benchmarks.shards_child", action, key]
        argv += [str(raw or self._folder / "raw"), str(folder or self._folder / "stored" / key)]
        return run_json(argv, scratch=self._scratch)
