"""Real tasks on the real cluster: a perfect script earns 1 on every one, a wrong script 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import Status, Task
from hpcroll.fs import RunPaths
from hpcroll.launch import JobState
from hpcroll.shards import open_run, verify_run
from hpcroll.spool import read_events, read_worker
from hpcroll.tasks import RowFormat, from_jsonl
from hpcroll.testing.demo import FAMILIES, demo_tasks
from hpcroll.testing.oracle import oracle_script, wrong_script
from tests.capabilities import IMAGES, TASK_DATA, need
from tests.release_pairs import FAST_PAIRS, release_tasks

pytestmark = [pytest.mark.slurm, pytest.mark.apptainer, pytest.mark.timeout(1500)]

ROWS = 40
ROW_FILES = {
    RowFormat.GSM8K: "gsm8k.jsonl",
    RowFormat.SCIBENCH: "scibench.jsonl",
    RowFormat.HUMANEVAL: "humaneval.jsonl",
}
LAYOUTS = {
    "one-leg": ([["init", "run", "eval"]], "cpu", 2),
    "two-legs": ([["init", "run"], ["eval"]], {"init+run": "run", "eval": "eval"}, 1),
}


def wrongly(task: Task) -> Task:
    """The same problem under another name and prompt, which the policy server answers wrongly."""
    return task.model_copy(
        update={"task_id": f"{task.task_id}-wrong", "prompt": f"{task.prompt}\n\n(The careless sample.)"}
    )


def rows() -> list[Task]:
    need("task-data")
    return [
        task
        for row_format, name in ROW_FILES.items()
        for task in from_jsonl(TASK_DATA / name, row_format)[:ROWS]
    ]


def config(layout: str, url: str) -> dict[str, Any]:
    legs, partition, _ = LAYOUTS[layout]
    return {
        # A gold patch is one reply.
        "model": {
            "endpoints": [url],
            "context_tokens": 200_000,
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 60_000},
        },
        "legs": legs,
        "sandbox": {"name": "apptainer", "image": str(IMAGES / "base")},
        "stages": {
            "init": {"width": 2, "timeout_s": 600},
            "run": {"width": 4, "timeout_s": 600},
            "eval": {"width": 2, "timeout_s": 900},
        },
        "lease": {"beat_s": 2, "silence_s": 600, "scheduler_poll_s": 5},
        # All CPUs of a node: the two workers stand on two nodes.
        "launch": {"partition": partition, "cpus": 4, "memory_mb": 3000, "time_min": 60, "idle_s": 2},
    }


def solve(
    layout: str, tasks: Sequence[Task], run_dir: Path, serve_scripts: Callable[..., str]
) -> dict[str, set[float | None]]:
    """Runs each task rightly and wrongly on the cluster; checks every record; the rewards by submission."""
    wrong = [wrongly(task) for task in tasks]
    url = serve_scripts([*map(oracle_script, tasks), *map(wrong_script, wrong)])
    run = Run.create(run_dir, config=config(layout, url))
    right_key, wrong_key = "right", "wrong"
    run.submit(tasks, samples=1, key=right_key)
    run.submit(wrong, samples=1, key=wrong_key)
    handles = run.launch(workers=LAYOUTS[layout][2], wait=True)
    assert set(run.job_states(handles)) == {JobState.DONE}
    results = {key: list(run.results(key, wait=False)) for key in (right_key, wrong_key)}
    for key, found in results.items():
        assert len(found) == len(tasks), key
        assert {result.status for result in found} == {Status.COMPLETED}, key
    report = verify_run(run.path)
    assert report.ok, report
    assert report.committed == 2 * len(tasks)
    assert_both_nodes_committed(run)
    odd = [result for result in results[right_key] if result.reward != 1.0]
    odd += [result for result in results[wrong_key] if result.reward != 0.0]
    assert not odd, [(each.task_id, each.reward, verdict_of(run, each.rollout_id)) for each in odd]
    return {key: {result.reward for result in found} for key, found in results.items()}


def assert_both_nodes_committed(run: Run) -> None:
    """At least a quarter of the commits, of all legs, was made on each of the two nodes."""
    paths = RunPaths(run.path)
    commits: Counter[str] = Counter()
    for event in read_events(paths):
        if event.event == "committed":
            worker = read_worker(paths.worker_file(event.incarnation))
            assert worker is not None
            commits[worker.host] += 1
    assert len(commits) == 2, commits
    assert min(commits.values()) >= sum(commits.values()) / 4, commits


def verdict_of(run: Run, rollout_id: str) -> Any:
    return open_run(run.path).get(rollout_id).record.verdict


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_is_scored_rightly(
    layout: str, shared_run_dir: Path, serve_scripts: Callable[..., str]
) -> None:
    tasks = [*rows(), *release_tasks(FAST_PAIRS)]
    assert solve(layout, tasks, shared_run_dir, serve_scripts) == {"right": {1.0}, "wrong": {0.0}}


def test_the_projects_own_tasks_are_scored_rightly(
    shared_run_dir: Path, serve_scripts: Callable[..., str]
) -> None:
    tasks = [task for family in FAMILIES for task in demo_tasks([family])[:2]]
    assert solve("two-legs", tasks, shared_run_dir, serve_scripts) == {"right": {1.0}, "wrong": {0.0}}


@pytest.mark.full
def test_every_release_pair_is_scored_rightly(
    shared_run_dir: Path, serve_scripts: Callable[..., str]
) -> None:
    assert solve("one-leg", release_tasks(), shared_run_dir, serve_scripts) == {
        "right": {1.0},
        "wrong": {0.0},
    }
