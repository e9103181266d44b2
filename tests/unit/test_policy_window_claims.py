"""Workers and the window: which groups they start, which they go on with, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcroll.contract import EndReason, Failure, RolloutRef
from hpcroll.policy import PolicyRegistry, WindowWatch
from hpcroll.spool import Claim, Claims, Heartbeat, Incarnation, Spool, mark_ended
from tests.spools import (
    TWO_LEGS,
    Worker,
    count_operations,
    make_spool,
    start_worker,
    submit,
    unknown_job,
    wait_until,
)

SLOW = {"beat_s": 1000.0, "silence_s": 6000.0}


class Limit:
    """A limit that a test sets."""

    def __init__(self, value: int | None) -> None:
        self.value = value

    def __call__(self) -> int | None:
        return self.value


def start(spool: Spool, limit: Callable[[], int | None], *, leg: str | None = None, rank: int = 0) -> Worker:
    incarnation = Incarnation.register(spool, leg=leg or spool.config.leg_names[0], rank=rank)
    claims = Claims(spool, incarnation, job_ended=unknown_job, limit=limit)
    return Worker(spool, incarnation, claims, Heartbeat(incarnation))


def groups(claims: list[Claim], samples: int = 2) -> list[int]:
    return sorted({claim.rollout.ref.ordinal // samples for claim in claims})


def test_groups_are_started_up_to_the_limit_and_no_further(tmp_path: Path) -> None:
    spool, limit = make_spool(tmp_path), Limit(3)
    submit(spool, tasks=6, samples=2)
    worker = start(spool, limit)
    claims = worker.drain()
    assert groups(claims) == [0, 1, 2]
    assert len(claims) == 6
    assert worker.claims.waits_for_limit
    assert not worker.claims.finished()
    limit.value = 4
    assert groups(worker.drain()) == [3]
    limit.value = None
    assert groups(worker.drain()) == [4, 5]
    assert not worker.claims.waits_for_limit


def test_nothing_is_started_at_limit_zero(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool)
    worker = start(spool, Limit(0))
    assert worker.drain() == []
    assert worker.claims.waits_for_limit


def test_positions_count_over_all_submissions_in_their_order(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    first, second = submit(spool, tasks=3, key="a").segment, submit(spool, tasks=3, key="b").segment
    claims = start(spool, Limit(4)).drain()
    assert groups([claim for claim in claims if claim.rollout.ref.segment == first.name]) == [0, 1, 2]
    assert groups([claim for claim in claims if claim.rollout.ref.segment == second.name]) == [0]


def test_submission_stands_behind_those_that_its_submitter_knew_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make_spool(tmp_path)
    first = submit(spool, tasks=3, key="a").segment
    monkeypatch.setattr("hpcroll.spool.submission.time.time", lambda: 1.0)
    second = submit(Spool.open(tmp_path), tasks=3, key="b").segment
    assert [segment.name for segment in Spool.open(tmp_path).segments()] == [first.name, second.name]
    assert second.header.groups_before == 3


def test_worker_whose_listing_lacks_an_earlier_submission_starts_no_more(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    first = submit(spool, tasks=3, key="a").segment
    submit(spool, tasks=3, key="b")
    file = spool.paths.segment_file(first.name)
    hidden = file.rename(file.with_suffix(".hidden"))
    worker = start(Spool.open(tmp_path), Limit(4))
    assert [claim.rollout.ref.ordinal // 2 for claim in worker.drain()] == [0, 0]
    hidden.rename(file)
    late = start(Spool.open(tmp_path), Limit(4))
    assert len(late.drain()) == 6, "those of the first, and none of the second"


def test_started_group_goes_on_beyond_the_limit(tmp_path: Path) -> None:
    spool, limit = make_spool(tmp_path), Limit(None)
    submit(spool, tasks=6, samples=2)
    worker = start(spool, limit)
    claims = worker.drain()
    for claim in claims:
        if claim.rollout.ref.ordinal // 2 in (1, 4):
            claim.fail(Failure(attempt=1, reason=EndReason.INFRA, message="no node"))
    limit.value = 2
    again = start(spool, limit).drain()
    assert groups(again) == [1, 4]
    assert {claim.attempt for claim in again} == {2}


def test_rest_of_a_started_group_is_started_too(tmp_path: Path) -> None:
    spool, limit = make_spool(tmp_path), Limit(None)
    submit(spool, tasks=3, samples=4)
    worker = start(spool, limit)
    while worker.claim().rollout.ref.ordinal // 4 != 1:
        pass
    limit.value = 0
    rest = start(spool, limit).drain()
    assert set(groups(rest, samples=4)) <= {0, 1}
    assert 1 in groups(rest, samples=4)


def test_dead_workers_groups_are_taken_over_beyond_the_limit(tmp_path: Path) -> None:
    spool, limit = make_spool(tmp_path), Limit(None)
    submit(spool, tasks=2, samples=2)
    dead = start(spool, limit)
    assert len(dead.drain()) == 4
    mark_ended(spool.paths, dead.id)
    limit.value = 0
    taker = start(spool, limit, rank=1)
    taken: list[Claim] = []
    wait_until(lambda: taken.extend(taker.drain()) or len(taken) == 4, "all four are taken over")
    assert {claim.attempt for claim in taken} == {2}


def test_group_over_two_directories_is_one_group(tmp_path: Path) -> None:
    """4,096 rollouts stand in one directory: with 3 samples, a group lies in two of them."""
    spool = make_spool(tmp_path, **SLOW)
    submit(spool, tasks=1370, samples=3)
    worker = start(spool, Limit(1365))
    assert len(worker.drain()) == 1365 * 3
    assert worker.claims.waits_for_limit
    limit = Limit(1366)
    taker = start(spool, limit, rank=1)
    first = taker.claim()
    assert first.rollout.ref.ordinal // 3 == 1365
    limit.value = 1365
    rest = taker.drain()
    assert {first.rollout.ref.ordinal, *(claim.rollout.ref.ordinal for claim in rest)} == {4095, 4096, 4097}


def test_later_legs_do_not_wait(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    submit(spool, tasks=4, samples=1)
    runner = start_worker(spool)
    for claim in runner.drain():
        assert runner.commit(claim)
    assert len(start(spool, Limit(0), leg="eval").drain()) == 4


def test_cancelled_rollouts_are_committed_beyond_the_limit(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    segment = submit(spool, tasks=6, samples=2).segment
    spool.wishes.cancel(segment=segment.name, group=2)
    worker = start(spool, Limit(1))
    claims = worker.drain()
    assert groups(claims) == [0, 2]
    assert [claim.cancelled for claim in sorted(claims, key=lambda c: c.rollout.ref.ordinal)] == [
        False,
        False,
        True,
        True,
    ]


def test_worker_that_cannot_read_the_window_starts_nothing_and_loses_nothing(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=1, samples=1)

    def unread() -> int:
        raise OSError(116, "Stale file handle")

    worker = start(spool, unread)
    with pytest.raises(OSError, match="Stale"):
        worker.claims.next()
    assert start_worker(spool).claim().attempt == 1


def test_workers_that_race_start_what_the_trainer_allows(tmp_path: Path) -> None:
    """Four workers, each with its own view of the files, while a trainer settles."""
    spool = make_spool(tmp_path, **SLOW)
    segment = submit(spool, tasks=60, samples=2).segment
    trainer = PolicyRegistry(spool.paths)
    trainer.window(groups=5)
    seen: list[tuple[int, int]] = []

    def work(rank: int) -> list[Claim]:
        mine = Spool.open(tmp_path)
        # Each look is anew: the clock stands still for everything but the watch.
        ticks = iter(range(10**9))
        watch = WindowWatch(mine.paths, "policy", clock=lambda: float(next(ticks)))
        worker = start(mine, watch.limit, rank=rank)
        claims = []
        while len(started(mine, segment.name)) < 60:
            claim = worker.claims.next()
            if claim is not None:
                claims.append(claim)
                # Read afterwards: it only grows, so that what was allowed then is still below it.
                seen.append(
                    (claim.rollout.ref.ordinal // 2, PolicyRegistry(mine.paths).allowance().limit or 0)
                )
        return claims

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, rank) for rank in range(4)]
        settled = 0
        while not all(future.done() for future in futures):
            count = len(started(spool, segment.name))
            assert count <= settled + 5
            if count == min(60, settled + 5):
                settled = count
                trainer.settle(settled)
        claims = [claim for future in futures for claim in future.result()]
    assert len({claim.rollout.ref for claim in claims}) == len(claims)
    assert all(group < allowed for group, allowed in seen)


def started(spool: Spool, segment: str) -> set[int]:
    """Groups of which a rollout was claimed, as the names say."""
    directory = spool.paths.claim_directory(spool.config.leg_names[0], RolloutRef(segment=segment, ordinal=0))
    return {int(path.name.partition(".")[0]) // 2 for path in directory.iterdir() if path.name[0] != "."}


def test_waiting_worker_leaves_the_file_system_alone(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, **SLOW)
    submit(spool, tasks=6_000, samples=8)
    PolicyRegistry(spool.paths).window(groups=600)
    watch = WindowWatch(spool.paths, "policy")
    worker = start(spool, watch.limit)
    assert len(worker.drain()) == 4_800
    began_s = time.monotonic()
    with count_operations(tmp_path) as operations:
        for _ in range(300):
            assert worker.claims.next() is None
    seconds = time.monotonic() - began_s
    listed = {path for event, path in operations if event == "os.listdir" and path.startswith("claims")}
    assert len(operations) < 20 * (seconds + 1), "bounded by time, not by calls or rollouts"
    assert len(listed) <= 3, "no directory far beyond the limit is looked at"


def test_claim_under_a_window_costs_no_more_names(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, **SLOW)
    submit(spool, tasks=200, samples=4)
    PolicyRegistry(spool.paths).window(groups=150)
    ticks = iter(range(10**9))
    watch = WindowWatch(spool.paths, "policy", clock=lambda: next(ticks) / 1000)
    worker = start(spool, watch.limit)
    with count_operations(tmp_path) as operations:
        for _ in range(400):
            worker.claim()
    assert len(operations) / 400 < 1.2, "a link"
