"""Two ranks over two caching mounts, one of them far behind: the same batches in the same steps."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcroll.fs import publish
from hpcroll.shards import Step, open_run
from hpcroll.shards.level1.packer import Packer
from hpcroll.shards.level1.retention import Retention
from tests.faults.test_spool_sharedfs import CACHE_S, mount
from tests.shard_runs import ShardRun

pytestmark = pytest.mark.sharedfs

STALE_S = 30
"""How long the second mount trusts what it saw of names, sizes and listings."""
USABLE: dict[str, Any] = {"trainable": True, "not_trainable_because": ()}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[ShardRun, Path, Path]]:
    """The run as its file server has it, and as two nodes see it."""
    backing = ShardRun.create(tmp_path / "backing")
    slow = [f"{name}={STALE_S}" for name in ("attr_timeout", "entry_timeout", "dcache_timeout")]
    with ExitStack() as stack:
        fresh = stack.enter_context(mount(backing.paths.root, tmp_path / "n1"))
        stale = stack.enter_context(mount(backing.paths.root, tmp_path / "n2", *slow))
        yield backing, fresh, stale


def contents(step: Step) -> Any:
    return [
        [(str(name), int(n)) for name, n in zip(batch.rollout_id, np.diff(batch.cu_seqlens), strict=True)]
        for batch in step.batches
    ]


def steps_of(root: Path, rank: int, linger_s: float) -> list[tuple[int, tuple[str, ...], Any, float]]:
    reader = open_run(root).follow(trainer="grpo", rank=rank, world=2, poll_s=0.1, linger_s=linger_s)
    return [
        (step.number, tuple(group.group_id for group in step.groups), contents(step), time.monotonic())
        for step in reader.steps(groups=2, max_tokens=4000, timeout_s=120)
    ]


def test_ranks_on_a_fresh_and_a_stale_mount_take_the_same_steps(nodes: tuple[ShardRun, Path, Path]) -> None:
    run, fresh, stale = nodes
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8), **USABLE)
        for root in (fresh, stale):  # both mounts have seen the run as it is now
            assert len(list(open_run(root, columns=["tokens"]))) == 8
        with ThreadPoolExecutor(2) as pool:
            ranks = [
                pool.submit(steps_of, root, rank, CACHE_S + 1) for rank, root in enumerate((fresh, stale))
            ]
            for first in range(8, 48, 4):
                run.commit(writer, "w0", range(first, first + 4), **USABLE)
            with run.writer("w1") as late:  # a shard that neither has seen
                run.commit(late, "w1", range(48, 56), **USABLE)
            publish(run.paths.closed, b"{}")
            one, two = (rank.result(150) for rank in ranks)
    assert [(number, groups) for number, groups, _, _ in one] == [(n, g) for n, g, _, _ in two]
    settled = [group for _, groups, _, _ in one for group in groups]
    assert len(settled) == len(set(settled)) == 14
    seen = Counter(row for step in (*one, *two) for batch in step[2] for row in batch)
    stored = [s for s in open_run(run.paths.root) if s.group_id in settled]
    assert seen == Counter((s.rollout_id, len(t)) for s in stored for t in s.tokens if t.loss_mask.any()), (
        "each segment went to one rank"
    )


def test_rank_on_the_stale_mount_plans_what_it_sees_and_the_other_follows(
    nodes: tuple[ShardRun, Path, Path],
) -> None:
    run, fresh, stale = nodes
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(16), **USABLE)
        assert len(list(open_run(stale, columns=["tokens"]))) == 16
        with ThreadPoolExecutor(2) as pool:
            ranks = [
                pool.submit(steps_of, root, rank, STALE_S + 1) for rank, root in enumerate((stale, fresh))
            ]
            run.commit(writer, "w0", range(16, 32), **USABLE)
            Packer(run.paths).pack()
            publish(run.paths.closed, b"{}")
            one, two = (rank.result(150) for rank in ranks)
    assert [step[:2] for step in one] == [step[:2] for step in two]
    assert sum(len(step[1]) for step in one) == 8


def test_commit_is_visible_within_the_time_that_the_mount_caches(nodes: tuple[ShardRun, Path, Path]) -> None:
    run, fresh, stale = nodes
    seen: dict[Path, dict[int, float]] = {fresh: {}, stale: {}}
    done = threading.Event()

    def follow(root: Path) -> None:
        reader = open_run(root, columns=["tokens"]).follow(poll_s=0.1, stop=done.is_set)
        for stored in reader:
            seen[root].setdefault(stored.ref.ordinal, time.monotonic())
            if all(len(found) == 12 for found in seen.values()):
                done.set()

    committed: dict[int, float] = {}
    with ThreadPoolExecutor(2) as pool, run.writer("w0") as writer:
        followers = [pool.submit(follow, root) for root in seen]
        for n in range(12):
            run.commit(writer, "w0", [n], **USABLE)
            committed[n] = time.monotonic()
            done.wait(0.3)
        done.wait(STALE_S + 10)
        done.set()
        for follower in followers:
            follower.result(60)
    assert all(len(found) == 12 for found in seen.values())
    lag = {root: max(found[n] - committed[n] for n in found) for root, found in seen.items()}
    assert lag[fresh] < CACHE_S + 2
    assert lag[stale] < STALE_S + 2


def test_shards_deleted_on_one_node_are_read_from_packs_on_the_other(
    nodes: tuple[ShardRun, Path, Path],
) -> None:
    run, _, stale = nodes
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(16), **USABLE)
    run.end("w0")
    reader = open_run(stale, columns=["tokens"]).follow(stop=lambda: True)
    stream = iter(reader)
    head = [next(stream).ref.ordinal for _ in range(3)]
    state = reader.state_dict()
    stream.close()  # type: ignore[attr-defined]
    Packer(run.paths).pack()
    assert Retention(run.paths).retain().deleted == ["w0.0"]
    resumed = open_run(stale, columns=["tokens"]).follow(stop=lambda: True)
    resumed.load_state_dict(state)
    assert sorted(head + [stored.ref.ordinal for stored in resumed]) == list(range(16))
