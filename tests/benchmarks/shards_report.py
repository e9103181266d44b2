"""The tables of the benchmark as Markdown, its goals, and its last line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.shards_measures import Measured, Result
from tests.benchmarks.shards_statistics import Statistics

FIVE = {
    "MDS": ("mds",),
    "WebDataset": ("webdataset",),
    "LitData": ("litdata_chunk", "litdata_batch"),
    "ArrayRecord": ("array_record_1", "array_record_8"),
    "Parquet": (
        "parquet_8",
        "parquet_8_dictionary",
        "parquet_64",
        "parquet_64_dictionary",
        "parquet_64_planes",
        "parquet_64_planes_6",
    ),
}
"""The peers that come with a reader for training, each with the set-ups tried; the best of them counts."""
OTHERS = ("jsonl", "msgpack", "sqlite", "arrow")
EVERY_SET_UP = tuple(key for keys in FIVE.values() for key in keys)
AT_LEVEL_3 = tuple(key for key in EVERY_SET_UP if not key.endswith("_6"))
PEERS = (*OTHERS, *EVERY_SET_UP)
FEWER = ("litdata_chunk", "array_record_1", "parquet_8", "parquet_8_dictionary", "parquet_64_dictionary")
"""Set-ups that are left out where the set is small and time matters."""


@dataclass(frozen=True)
class Goal:
    """What was to be reached: `value` at least (or at most) `wanted`."""

    name: str
    value: float
    wanted: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted

    def line(self) -> str:
        bound = "<=" if self.at_most else ">="
        verdict = "reached" if self.reached else "MISSED"
        return f"| {self.name} | {self.value:.2f} | {bound} {self.wanted:g} | {verdict} |"


def describe_sets(sets: dict[str, Statistics]) -> Iterator[str]:
    """What the sets are like, side by side."""
    columns = [dict(statistics.rows()) for statistics in sets.values()]
    yield "| | " + " | ".join(sets) + " |"
    yield "|---|" + "---|" * len(sets)
    for name in columns[0]:
        yield f"| {name} | " + " | ".join(column[name] for column in columns) + " |"


def table(measured: Measured) -> Iterator[str]:
    """One row for each format; reads in trajectories a second and in MB of raw data a second."""
    yield (
        "| format | ratio | write MB/s | tokens /s | full /s | tokens MB/s | random ms, p50 / p99 | "
        "reader MB | flips noticed, silent | left of a cut |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for result in measured.results.values():
        yield _row(result, measured)


def _row(result: Result, measured: Measured) -> str:
    damage, random = result.damage, result.random
    tokens_s = result.best_s("tokens")
    cells = (
        result.name,
        f"{result.ratio:.2f}",
        f"{result.write_mb_s:.0f}",
        f"{measured.rows / tokens_s:,.0f}",
        f"{measured.rows / result.best_s('full'):,.0f}",
        f"{measured.tokens * 10 / tokens_s / 1e6:,.0f}",
        f"{random['p50_ms']:.2f} / {random['p99_ms']:.2f}",
        f"{result.memory_mb:.0f}",
        f"{damage['noticed']:.0f}, {damage['silent']:.0f} of {damage['flips']:.0f}" if damage else "",
        f"{damage['left']:.0%} of {damage['kept']:.0%}" if damage else "",
    )
    return "| " + " | ".join(cells) + " |"


def smallest(measured: Measured, keys: Sequence[str]) -> Result:
    """The smallest of those of `keys` that were measured."""
    found = [result for key, result in measured.results.items() if key in keys]
    return min(found, key=lambda result: result.stored_bytes)


def size_against(measured: Measured, key: str, peers: Sequence[str]) -> float:
    """How many times larger than ours the smallest of `peers` is."""
    return smallest(measured, peers).stored_bytes / measured.results[key].stored_bytes


def goals(measured: Measured, commits: dict[str, Any]) -> list[Goal]:
    """Against what the issue asks for, from the figures of one set."""
    results = measured.results
    packed, level0 = results["packed"], results["level0"]
    return [
        Goal(
            "smallest of the five peers / packed float32",
            size_against(measured, "packed", AT_LEVEL_3),
            1.05,
        ),
        Goal("the same with float16", size_against(measured, "packed_float16", AT_LEVEL_3), 1.4),
        Goal(
            "smallest of all peers / packed float32",
            size_against(measured, "packed", (*OTHERS, *AT_LEVEL_3)),
            1.0,
        ),
        Goal(
            "as packed by default (zstd 6): the five / packed",
            size_against(measured, "packed_default", EVERY_SET_UP),
            1.05,
        ),
        Goal("tokens: zstd alone / packed, time", measured.share_of_limit("packed"), 0.7),
        Goal(
            "tokens: fastest of the five / packed, time", measured.times_faster("packed", EVERY_SET_UP), 3.5
        ),
        Goal("random read, packed, p50 ms", packed.random["p50_ms"], 2.0, at_most=True),
        Goal("random read, level 0, p50 ms", level0.random["p50_ms"], 0.35, at_most=True),
        Goal("reader, packed, MB above numpy", packed.memory_mb, 100, at_most=True),
        Goal("reader, level 0, MB above numpy", level0.memory_mb, 100, at_most=True),
        Goal("level 0, write MB/s", level0.write_mb_s, 150),
        Goal("level 0, append to durable, p99 ms", level0.durable_ms[1], 50, at_most=True),
        Goal("level 0, ratio", level0.ratio, 4.4),
        Goal("level 0 with dictionaries, ratio", results["level0_dictionary"].ratio, 5.5),
        Goal("commit to durable, p99 ms", commits["durable_ms"][1], 50, at_most=True),
        Goal("commit to visible, p99 ms", commits["visible_ms"][1], 2000, at_most=True),
    ]


def say_goals(found: Sequence[Goal], say: Callable[[str], None]) -> None:
    say("| goal | measured | wanted | |\n|---|---|---|---|")
    for goal in found:
        say(goal.line())


def last_line(measured: Measured, commits: dict[str, Any], suffix: str = "") -> str:
    """The figures of one set as `key=value`."""
    packed = measured.results["packed"]
    figures = {
        "size_vs_best_peer": size_against(measured, "packed", AT_LEVEL_3),
        "size_vs_best_peer_float16": size_against(measured, "packed_float16", AT_LEVEL_3),
        "size_vs_best_peer_level6": size_against(measured, "packed_default", EVERY_SET_UP),
        "tokens_read_vs_zstd": measured.share_of_limit("packed"),
        "tokens_read_vs_best_peer": measured.times_faster("packed", EVERY_SET_UP),
        "random_p50_ms": packed.random["p50_ms"],
        "random_p50_ms_level0": measured.results["level0"].random["p50_ms"],
        "level0_write_mb_s": measured.results["level0"].write_mb_s,
        "level0_ratio": measured.results["level0"].ratio,
        "level0_ratio_dictionary": measured.results["level0_dictionary"].ratio,
        "reader_mb": packed.memory_mb,
    }
    if commits:
        figures["durable_p99_ms"] = commits["durable_ms"][1]
        figures["visible_p99_ms"] = commits["visible_ms"][1]
    return " ".join(f"{name}{suffix}={value:.3f}" for name, value in figures.items())
