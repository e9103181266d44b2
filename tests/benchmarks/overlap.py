"""Stage overlap through the spool, with the time spent inside real Apptainer sandboxes.

Every stage sleeps inside its sandbox for a known time, so that the best possible makespan is known too;
what is measured is read from the run's events. Last line:

    makespan_over_bound=… sequential_over_bound=… heavy_tail_over_bound=… run_slots_busy=…
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcroll.api import Run
from hpcroll.contract import Task
from hpcroll.spool import Spool, read_events
from hpcroll.testing.policy_server import PolicyServer, Script, solves

STAGES = ("init", "run", "eval")


@dataclass(frozen=True)
class Durations:
    """Seconds that one rollout sleeps in each stage; a task's set-up is repeated before its verifier."""

    init: float
    run: float
    verify: float

    @property
    def eval(self) -> float:
        return self.init + self.verify


@dataclass(frozen=True)
class Interval:
    rollout: str
    start_s: float
    end_s: float


def tasks_of(durations: list[Durations]) -> list[Task]:
    return [
        Task(
            task_id=f"sleep-{index}",
            handler="command",
            prompt=f"Overlap benchmark, rollout number {index:04d}.",
            spec={
                "setup": ["sleep", f"{each.init:.3f}"],
                "verify": ["sh", "-c", f"sleep {each.verify:.3f}; echo 1 > reward.txt"],
            },
        )
        for index, each in enumerate(durations)
    ]


def scripts_of(tasks: list[Task], durations: list[Durations]) -> list[Script]:
    return [
        Script(prompt=task.prompt, behaviours=(solves([f"sleep {each.run:.3f}"], "done"),))
        for task, each in zip(tasks, durations, strict=True)
    ]


def measure(
    root: Path,
    durations: list[Durations],
    *,
    image: str,
    widths: tuple[int, int, int],
    workers: int,
    overlap: bool,
) -> dict[str, list[Interval]]:
    """Runs all rollouts and returns each stage's intervals, in seconds on the node's monotonic clock."""
    tasks = tasks_of(durations)
    return asyncio.run(_measure(root, tasks, durations, image, widths, workers, overlap))


async def _measure(
    root: Path,
    tasks: list[Task],
    durations: list[Durations],
    image: str,
    widths: tuple[int, int, int],
    workers: int,
    overlap: bool,
) -> dict[str, list[Interval]]:
    async with PolicyServer(scripts_of(tasks, durations), seed=1) as server:
        config = {
            "model": {"endpoints": [server.base_url]},
            "sandbox": {"name": "apptainer", "image": image},
            "harness": {"command_timeout_s": 600},
            "stages": {
                "overlap": overlap,
                **{
                    stage: {"width": width, "timeout_s": 900}
                    for stage, width in zip(STAGES, widths, strict=True)
                },
            },
            "launch": {"launcher": "local", "idle_s": 0},
        }
        run = Run.create(root, config=config)
        run.submit(tasks, samples=1, key="overlap")
        await asyncio.to_thread(run.launch, workers=workers, wait=True)
    return intervals_of(Spool.open(root))


def intervals_of(spool: Spool) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {stage: [] for stage in STAGES}
    started: dict[tuple[str, str], float] = {}
    for event in sorted(read_events(spool.paths), key=lambda each: each.monotonic_s):
        stage, _, edge = event.event.partition(".")
        if stage not in found:
            continue
        if edge == "start":
            started[stage, event.fields["rollout"]] = event.monotonic_s
        else:
            begin = started.pop((stage, event.fields["rollout"]))
            found[stage].append(Interval(event.fields["rollout"], begin, event.monotonic_s))
    return found


def makespan_s(intervals: dict[str, list[Interval]]) -> float:
    every = [each for stage in STAGES for each in intervals[stage]]
    return max(each.end_s for each in every) - min(each.start_s for each in every)


def list_schedule_s(durations: list[Durations], slots: tuple[int, int, int]) -> float:
    """Makespan of greedy list scheduling, in order, on this many slots per stage, without any overhead."""
    ready = [0.0] * len(durations)
    for stage, width in zip(STAGES, slots, strict=True):
        free = [0.0] * width
        for index in sorted(range(len(durations)), key=lambda each: ready[each]):
            begin = max(heapq.heappop(free), ready[index])
            ready[index] = begin + getattr(durations[index], stage)
            heapq.heappush(free, ready[index])
    return max(ready)


def slots_busy(run: list[Interval], slots: int) -> float:
    """Share of run-slot time in use from the first start until the last rollout has started."""
    begin, end = min(each.start_s for each in run), max(each.start_s for each in run)
    busy = sum(min(each.end_s, end) - each.start_s for each in run)
    return busy / (slots * (end - begin))


def heavy_tailed(count: int, seed: int) -> list[Durations]:
    """Log-normal stage times: medians 0.5 s, 3 s and 1 s, the longest runs about ten times the median."""
    source = random.Random(seed)

    def draw(median_s: float, sigma: float) -> float:
        return median_s * source.lognormvariate(0.0, sigma)

    return [Durations(draw(0.5, 0.3), draw(3.0, 0.9), draw(0.5, 0.3)) for _ in range(count)]


def report(name: str, measured_s: float, bound_s: float) -> float:
    print(f"{name}: {measured_s:.1f} s, bound {bound_s:.1f} s, ratio {measured_s / bound_s:.3f}", flush=True)
    return measured_s / bound_s


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default="/var/lib/hpcroll-test/images/base")
    parser.add_argument("--rollouts", type=int, default=20, help="rollouts with stages of 2 / 6 / 2 s")
    parser.add_argument("--heavy", type=int, default=80, help="rollouts with heavy-tailed stages")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hpcroll-overlap-") as folder:
        root, even = Path(folder), [Durations(2.0, 6.0, 0.0)] * options.rollouts
        bound_s = options.rollouts * 6.0 + 4.0

        def run(name: str, durations: list[Durations], **setting: object) -> dict[str, list[Interval]]:
            return measure(root / name, durations, image=options.image, **setting)  # type: ignore[arg-type]

        overlapped = run("overlap", even, widths=(1, 1, 1), workers=1, overlap=True)
        overlap = report("overlapping stages", makespan_s(overlapped), bound_s)
        in_turn = run("sequential", even, widths=(1, 1, 1), workers=1, overlap=False)
        sequential = report("one rollout at a time", makespan_s(in_turn), bound_s)
        heavy = heavy_tailed(options.heavy, seed=7)
        tailed = run("heavy", heavy, widths=(2, 4, 2), workers=2, overlap=True)
        tail = report("heavy-tailed, two workers", makespan_s(tailed), list_schedule_s(heavy, (4, 8, 4)))
        busy = slots_busy(tailed["run"], 8)
    print(
        f"makespan_over_bound={overlap:.3f} sequential_over_bound={sequential:.3f} "
        f"heavy_tail_over_bound={tail:.3f} run_slots_busy={busy:.3f}"
    )


if __name__ == "__main__":
    main()
