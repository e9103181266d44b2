"""`swe` tasks of real package releases, built once per machine and shared by every test that wants them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

import hpcroll.evaluators
import hpcroll.tasks
from hpcroll.config import SandboxConfig
from hpcroll.contract import Task
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.tasks import ReleasePair, from_sdist, load_release_task
from tests.capabilities import IMAGES, TASK_DATA, need

CACHE = Path(os.environ.get("HPCROLL_TEST_CACHE") or f"/var/tmp/hpcroll-test-cache-{os.getuid()}")
WORKERS = 2

FAST_PAIRS = (
    "pathspec-0.11.0-0.11.1",
    "pathspec-0.11.1-0.11.2",
    "prettytable-3.1.0-3.1.1",
    "prettytable-3.1.1-3.2.0",
    "prettytable-3.3.0-3.4.0",
    "voluptuous-0.15.0-0.15.1",
    "xmltodict-0.14.1-0.14.2",
    "xmltodict-0.14.2-0.15.0",
    "xmltodict-0.15.0-0.15.1",
    "xmltodict-0.15.1-1.0.0",
    "xmltodict-1.0.1-1.0.2",
    "markdown-3.3.6-3.3.7",
)
"""The twelve whose tests take least time."""


@cache
def release_rows() -> dict[str, dict[str, Any]]:
    """The verified pairs, by name; skips the calling test where the task data is missing."""
    need("task-data")
    lines = (TASK_DATA / "release_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    return {release_pair(row).name: row for row in map(json.loads, lines)}


def release_pair(row: dict[str, Any]) -> ReleasePair:
    """What the builder needs of a row; the ids that were found by hand are none of it."""
    return ReleasePair(
        package=row["package"],
        old=row["old"],
        new=row["new"],
        tests_paths=row["tests_paths"],
        library_paths=row["library_paths"],
        test_command=row["pytest_command"],
        requirements=row["extra_requirements"],
        python=row["python"],
        problem_statement=row["problem_statement"],
    )


def release_tasks(names: Sequence[str] | None = None) -> list[Task]:
    """The tasks of these pairs (all where None), in this order; built where the cache has them not yet.

    The cache is keyed by the row and by the code that builds and evaluates, so that nothing stale passes.
    """
    need("task-data")
    need("bwrap")
    rows = release_rows()
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(_task, [rows[name] for name in (rows if names is None else names)]))


def release_sandbox(scratch: Path) -> SandboxConfig:
    """The sandbox in which pairs are tried: in the image that other tests run them in, where there is one.

    Which tests pass depends on the interpreter's patch release, so that both must have the same.
    """
    image = IMAGES / "base"
    return SandboxConfig(name="bwrap", image=str(image) if image.is_dir() else "host", scratch=scratch)


def _task(row: dict[str, Any]) -> Task:
    pair = release_pair(row)
    image = Path(release_sandbox(CACHE).image or "").resolve().name
    key = f"{_code_digest()}{image}{json.dumps(row, sort_keys=True)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    home = CACHE / "releases" / digest[:16]
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):  # on this node only, between two test runs of one user
        if not (home / pair.name).is_dir():
            provider = BwrapProvider(release_sandbox(CACHE))
            from_sdist(pair, home, provider=provider, runs=1)
    return load_release_task(home / pair.name)


@cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for package in (hpcroll.tasks, hpcroll.evaluators):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
