"""The demo: the main job on one machine, from submission to the trainer's loop, with a scripted policy."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hpcroll.api import Run
from hpcroll.contract import Task
from hpcroll.errors import HpcrollError
from hpcroll.report import print_trajectory, status_line
from hpcroll.shards import open_run, verify_run
from hpcroll.testing.demo import FAMILIES, demo_scripts, demo_tasks
from hpcroll.testing.policy_server import PolicyServer

TASKS_PER_FAMILY = 2
SAMPLES = 4
WORKERS = 2
_WATCH_S = 1.0
_PACK_TOKENS = 8192


def run_demo(run_dir: Path | None = None, *, seed: int = 7) -> int:
    """Runs the demo in `run_dir` (`runs/demo-<time>` where absent); 0, or 1 where a rollout went wrong.

    Prints what it does; its last line is `demo: N rollouts committed, M action tokens, mean reward R`.
    Needs neither root nor Slurm; raises `HpcrollError` where this machine has no user namespaces.
    """
    root = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    tasks = [task for family in FAMILIES for task in demo_tasks([family])[:TASKS_PER_FAMILY]]
    console = Console()
    return asyncio.run(_demo(console, root, tasks, seed))


async def _demo(console: Console, root: Path, tasks: list[Task], seed: int) -> int:
    async with PolicyServer(demo_scripts(tasks), seed=seed, remember=True) as server:
        console.rule("1. a policy server (scripted: it plays an agent's part, no model runs)")
        console.print(f"serving at {server.base_url}")
        run = await asyncio.to_thread(_submit, console, root, tasks, server.base_url)
        console.rule(f"3. {WORKERS} workers on this machine, each rollout in a bwrap sandbox")
        await asyncio.to_thread(run.launch, workers=WORKERS)
        await _watch(console, run, server)
    console.rule("4. the shards, as a trainer reads them")
    await asyncio.to_thread(_read, console, run)
    console.rule("5. every invariant of every record")
    report = verify_run(run.path)
    console.print(f"{report.committed} records in {report.shards} shards: {len(report.problems)} problems")
    for problem in report.problems:
        console.print(problem, markup=False)
    return _conclude(console, run, sound=report.ok)


def _submit(console: Console, root: Path, tasks: list[Task], url: str) -> Run:
    console.rule("2. a run: tasks in, policy version 0 published")
    config = {
        "model": {"endpoints": [url]},
        "sandbox": {"name": "bwrap", "image": "host"},
        "launch": {"launcher": "local", "idle_s": 1.0},
        "lease": {"beat_s": 1.0, "silence_s": 30.0},
    }
    run = Run.create(root, config)
    run.policy.publish(0, weights=None)
    families = Counter(task.handler for task in tasks)
    run.submit(tasks, samples=SAMPLES, key="demo")
    listed = ", ".join(f"{count} {family}" for family, count in families.items())
    console.print(f"{run.path}: {len(tasks)} tasks ({listed}), {SAMPLES} samples of each")
    return run


async def _watch(console: Console, run: Run, server: PolicyServer) -> None:
    """Prints the status until all is committed; publishes a new version half-way, as a trainer does."""
    while True:
        status = await asyncio.to_thread(run.status)
        console.print(status_line(status), markup=False, highlight=False)
        if status.done:
            return
        if status.workers_alive == 0 and status.workers_ended:
            raise HpcrollError(f"every worker ended before the run was done; see `hpcroll logs {run.path}`")
        if status.committed >= status.total // 2 and server.version == 0:
            run.policy.publish(1, weights=None)
            server.set_version(1)
            console.print("published policy version 1")
        await asyncio.sleep(_WATCH_S)


def _read(console: Console, run: Run) -> None:
    rewards: dict[str, list[float]] = {}
    tokens: Counter[str] = Counter()
    for stored in open_run(run.path):
        family = stored.record.handler
        rewards.setdefault(family, []).append(0.0 if stored.reward is None else stored.reward)
        tokens[family] += sum(int(arrays.loss_mask.sum()) for arrays in stored.tokens)
    table = Table("family", "rollouts", "reward 1", "reward 0", "mean reward", "trained tokens")
    for family, values in sorted(rewards.items()):
        ones = sum(value == 1.0 for value in values)
        zeros = sum(value == 0.0 for value in values)
        mean = float(np.mean(values))
        table.add_row(family, f"{len(values)}", f"{ones}", f"{zeros}", f"{mean:.2f}", f"{tokens[family]}")
    console.print(table)
    batches = list(open_run(run.path).packed(max_tokens=_PACK_TOKENS))
    console.print(
        f"{len(batches)} packed batches of at most {_PACK_TOKENS} tokens: "
        f"{sum(len(batch.ids) for batch in batches)} tokens, "
        f"{sum(int(batch.loss_mask.sum()) for batch in batches)} of them trained on"
    )


def _conclude(console: Console, run: Run, *, sound: bool) -> int:
    results = list(run.results("demo", wait=False))
    shown = next((result for result in results if result.reward == 1.0), results[0])
    console.rule(f"6. one trajectory: hpcroll show {run.path} {shown.rollout_id}")
    print_trajectory(shown.trajectory())
    actions = sum(_sampled_tokens(run))
    rewards = [result.reward for result in results if result.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    console.print(
        f"demo: {len(results)} rollouts committed, {actions} action tokens, mean reward {mean:.2f}",
        highlight=False,
    )
    return 0 if sound and len(rewards) == len(results) else 1


def _sampled_tokens(run: Run) -> list[int]:
    """Sampled tokens of each committed rollout."""
    return [
        sum(int(arrays.sampled.sum()) for arrays in stored.tokens)
        for stored in open_run(run.path, columns=("tokens",))
    ]
