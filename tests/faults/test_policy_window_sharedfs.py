"""The window through a mount that trusts what it saw for long: it may let rollouts wait, never through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hpcroll.contract import RolloutRef
from hpcroll.fs import read_fresh
from hpcroll.policy import PolicyRegistry, WindowWatch
from hpcroll.spool import Claim, Claims, Heartbeat, Incarnation, Spool
from tests.faults.test_spool_sharedfs import CACHE_S, mount
from tests.spools import Worker, make_config, submit, unknown_job, wait_until

pytestmark = pytest.mark.sharedfs

STALE_S = 30
"""How long the worker's mount trusts names, sizes and listings."""
GROUPS, SAMPLES = 8, 2


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """One run directory: as its server, a trainer's node and a worker's stale node see it."""
    backing = tmp_path / "backing"
    backing.mkdir()
    config = make_config(beat_s=0.3, silence_s=60.0)
    slow = [f"{name}={STALE_S}" for name in ("attr_timeout", "entry_timeout", "dcache_timeout")]
    slow += ["negative_timeout=30"]
    with ExitStack() as stack:
        trainer = stack.enter_context(mount(backing, tmp_path / "n1"))
        Spool.create(trainer / "run", config)
        worker = stack.enter_context(mount(backing, tmp_path / "n2", *slow))
        yield backing / "run", trainer / "run", worker / "run"


def start(run: Path) -> Worker:
    spool = Spool.open(run)
    incarnation = Incarnation.register(spool, leg=spool.config.leg_names[0], rank=0)
    watch = WindowWatch(spool.paths, "policy")
    claims = Claims(spool, incarnation, job_ended=unknown_job, limit=watch.limit)
    return Worker(spool, incarnation, claims, Heartbeat(incarnation))


def claim_what_may_be(worker: Worker) -> list[Claim]:
    """What the worker gets now; a file system that gives no answer gives nothing."""
    claims = []
    with suppress(OSError):
        while (claim := worker.claims.next()) is not None:
            claims.append(claim)
    return claims


def started(run: Path, segment: str) -> set[int]:
    """Groups that were started, as the file server sees it."""
    spool = Spool.open(run)
    directory = spool.paths.claim_directory(spool.config.leg_names[0], RolloutRef(segment=segment, ordinal=0))
    names = [path.name for path in directory.iterdir() if not path.name.startswith(".")]
    return {int(name.partition(".")[0]) // SAMPLES for name in names}


def test_window_that_a_node_cached_as_missing_is_not_taken_for_none(nodes: tuple[Path, Path, Path]) -> None:
    server, trainer_run, worker_run = nodes
    paths = Spool.open(worker_run).paths
    assert read_fresh(paths.window_now) is None, "the client has asked, and may remember the answer"
    trainer = Spool.open(trainer_run)
    segment = submit(trainer, tasks=GROUPS, samples=SAMPLES).segment
    PolicyRegistry(trainer.paths).window(groups=2)
    worker = start(worker_run)
    claims: list[Claim] = []
    deadline_s = time.monotonic() + 3 * STALE_S
    while len(claims) < 2 * SAMPLES:
        assert time.monotonic() < deadline_s, "late, but not for ever"
        claims += claim_what_may_be(worker)
        assert started(server, segment.name) <= {0, 1}
        time.sleep(0.1)
    assert started(server, segment.name) == {0, 1}


def test_worker_on_a_stale_mount_is_late_and_never_ahead(nodes: tuple[Path, Path, Path]) -> None:
    server, trainer_run, worker_run = nodes
    trainer = Spool.open(trainer_run)
    segment = submit(trainer, tasks=GROUPS, samples=SAMPLES).segment
    policy = PolicyRegistry(trainer.paths)
    policy.publish(0, weights="w")
    policy.window(groups=3, versions=0, groups_per_version=2)
    worker = start(worker_run)
    seen_after_s = []
    for step in range(1, GROUPS // 2 + 1):
        allowed = min(GROUPS, 2 * step)
        began_s = time.monotonic()

        def caught_up(allowed: int = allowed) -> bool:
            claim_what_may_be(worker)
            now = started(server, segment.name)
            assert max(now, default=-1) < allowed, "further than the trainer allows"
            return len(now) == allowed

        wait_until(caught_up, f"the groups of step {step} are started")
        seen_after_s.append(time.monotonic() - began_s)
        policy.settle(2 * step)
        claim_what_may_be(worker)
        assert len(started(server, segment.name)) == allowed, "settled, but without the next version"
        policy.publish(step, weights=f"w{step}")
    assert max(seen_after_s) < STALE_S / 2 + CACHE_S, "opening asks the server, whatever was cached"


def test_trainer_on_another_node_goes_on_from_what_was_settled(nodes: tuple[Path, Path, Path]) -> None:
    _, trainer_run, worker_run = nodes
    one, two = PolicyRegistry(Spool.open(trainer_run).paths), PolicyRegistry(Spool.open(worker_run).paths)
    one.window(groups=4)
    for number in range(1, 9):
        registry = (one, two)[number % 2]
        assert registry.settle(number).limit == number + 4
        assert registry.settle(1).limit == number + 4
