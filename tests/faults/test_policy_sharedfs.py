"""The registry over two caching mounts: pauses and versions are seen well within what the caches keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpcroll.fs import RunPaths, make_directories
from hpcroll.policy import Gate, PauseMode, Pauses, PolicyRegistry
from tests.faults.test_spool_sharedfs import CACHE_S, mount

pytestmark = pytest.mark.sharedfs

KEPT_S = 10 * CACHE_S
"""How long these mounts trust what they saw."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[RunPaths, RunPaths]]:
    """One run directory, as a trainer's node and a worker's node see it."""
    backing = tmp_path / "backing"
    backing.mkdir()
    make_directories(list(RunPaths(backing).directories()))
    slow = [f"{name}={KEPT_S}" for name in ("attr_timeout", "entry_timeout", "dcache_timeout")]
    with ExitStack() as stack:
        points = [stack.enter_context(mount(backing, tmp_path / name, *slow)) for name in ("n1", "n2")]
        yield RunPaths(points[0]), RunPaths(points[1])


def seconds_until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 60, "never seen"
        time.sleep(0.05)
    return time.monotonic() - began


def test_pauses_are_seen_at_once_on_a_mount_whose_caches_are_warm(nodes: tuple[RunPaths, RunPaths]) -> None:
    trainer, worker = Pauses(nodes[0]), Pauses(nodes[1])
    worker.prepare()
    assert worker.read().pauses == ()
    for _ in range(5):
        trainer.put("trainer", mode=PauseMode.CUT, drain_s=1, max_s=60)
        assert seconds_until(lambda: bool(worker.read().pauses)) < CACHE_S
        trainer.lift("trainer")
        assert seconds_until(lambda: not worker.read().pauses) < CACHE_S


def test_both_mounts_change_the_pauses_in_one_order(nodes: tuple[RunPaths, RunPaths]) -> None:
    one, two = Pauses(nodes[0]), Pauses(nodes[1])
    one.prepare()
    for _ in range(5):
        for pauses, name in ((one, "trainer"), (two, "operator")):
            pauses.put(name, mode=PauseMode.CUT, drain_s=1, max_s=60)
        assert {pause.name for pause in two.read().pauses} == {"trainer", "operator"}
        assert one.lift("trainer")
        assert two.lift("operator")
        assert two.read().pauses == ()
    assert two.read().generation == 20


def test_worker_that_registered_a_moment_ago_is_waited_for_in_spite_of_a_cached_listing(
    nodes: tuple[RunPaths, RunPaths],
) -> None:
    trainer = PolicyRegistry(nodes[0])
    assert trainer.pause(timeout_s=5).complete  # lists the gates: none
    Gate(nodes[1], "late", silence_s=60).report(0, 0)
    assert set(trainer.pause(timeout_s=0.5).waiting) == {"late"}


def test_newest_version_is_read_anew(nodes: tuple[RunPaths, RunPaths]) -> None:
    trainer, worker = PolicyRegistry(nodes[0]), PolicyRegistry(nodes[1])
    trainer.publish(0, weights="w")
    worker.latest()
    for version in range(1, 6):
        trainer.publish(version, weights="w")

        def is_seen(version: int = version) -> bool:
            latest = worker.latest()
            return latest is not None and latest.version == version

        assert seconds_until(is_seen) < CACHE_S
