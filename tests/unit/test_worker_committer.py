"""Group commit: what fails fails alone, and nothing is visible before it is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcroll.contract import Trajectory
from hpcroll.shards import PreparedRecord, RecordAddress, ShardWriter, open_run
from hpcroll.spool import Claim
from hpcroll.testing.trajectories import random_trajectory
from hpcroll.worker.committer import Committer
from tests.spools import Worker, make_spool, start_worker, submit


class BrokenWriter(ShardWriter):
    """A writer on a disk with chosen faults."""

    refused: frozenset[str] = frozenset()
    sync_fails = False
    mark_fails = False

    def append(self, trajectory: Trajectory | PreparedRecord) -> RecordAddress:
        assert isinstance(trajectory, PreparedRecord)
        if trajectory.header.ref.rollout_id in self.refused:
            raise OSError(28, "No space left on device")
        return super().append(trajectory)

    def sync(self) -> None:
        if self.sync_fails:
            raise OSError(5, "Input/output error")
        super().sync()

    def mark(self, addresses: Iterable[RecordAddress]) -> None:
        if self.mark_fails:
            raise OSError(5, "Input/output error")
        super().mark(addresses)


def trajectory_of(worker: Worker, claim: Claim) -> Trajectory:
    return random_trajectory(
        claim.rollout.ref.ordinal,
        rollout_id=claim.rollout.rollout_id,
        attempt=claim.attempt,
        incarnation=worker.id,
        group_size=claim.rollout.group_size,
    )


def commit_all(
    worker: Worker, writer: ShardWriter, claims: list[Claim], *, window_s: float = 0.05
) -> list[bool | BaseException]:
    async def scenario() -> list[bool | BaseException]:
        committer = Committer(writer, window_s=window_s)
        running = asyncio.create_task(committer.run())
        commits = (committer.commit(claim, trajectory_of(worker, claim)) for claim in claims)
        try:
            return await asyncio.wait_for(asyncio.gather(*commits, return_exceptions=True), 60)
        finally:
            running.cancel()

    return asyncio.run(scenario())


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    spool = make_spool(tmp_path / "run")
    submit(spool, tasks=3, samples=2)
    return start_worker(spool)


def make_writer(worker: Worker, kind: type[ShardWriter] = BrokenWriter) -> BrokenWriter:
    writer = kind(worker.spool.paths, worker.id, worker.spool.config.shards)
    assert isinstance(writer, BrokenWriter)
    return writer


def visible(worker: Worker) -> set[str]:
    return {stored.rollout_id for stored in open_run(worker.spool.paths.root)}


def test_a_group_becomes_visible_at_once(worker: Worker) -> None:
    claims = worker.drain()
    with make_writer(worker) as writer:
        assert commit_all(worker, writer, claims) == [True] * 6
        assert visible(worker) == {claim.rollout.rollout_id for claim in claims}


def test_a_record_that_cannot_be_written_fails_alone(worker: Worker) -> None:
    claims = worker.drain()
    with make_writer(worker) as writer:
        writer.refused = frozenset({claims[2].rollout.rollout_id})
        outcome = commit_all(worker, writer, claims)
        assert [isinstance(each, OSError) for each in outcome] == [n == 2 for n in range(6)]
        assert len(visible(worker)) == 5


def test_nothing_is_visible_where_the_disk_did_not_confirm(worker: Worker) -> None:
    claims = worker.drain()
    with make_writer(worker) as writer:
        writer.sync_fails = True
        assert all(isinstance(each, OSError) for each in commit_all(worker, writer, claims))
        assert visible(worker) == set()
        assert not any(worker.spool.is_done(claim.rollout.ref) for claim in claims)


def test_a_missing_mark_costs_no_result(worker: Worker) -> None:
    claims = worker.drain()
    with make_writer(worker) as writer:
        writer.mark_fails = True
        assert commit_all(worker, writer, claims) == [True] * 6
    assert len(visible(worker)) == 6


def test_the_second_of_two_attempts_loses(worker: Worker) -> None:
    claim = worker.claim()
    claim.release()
    other = start_worker(worker.spool)
    again = next(each for each in other.drain() if each.rollout.ref == claim.rollout.ref)
    with make_writer(other) as writer:
        assert commit_all(other, writer, [again]) == [True]
    with make_writer(worker) as writer:
        assert commit_all(worker, writer, [claim]) == [False]
    stored = open_run(worker.spool.paths.root).get(claim.rollout.rollout_id)
    assert (stored.incarnation, stored.attempt) == (other.id, again.attempt)
