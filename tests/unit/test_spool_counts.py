"""Counts come from heartbeats; exact ones from names."""

from __future__ import annotations

from pathlib import Path

from hpcroll.contract import FailureClass, Stage, Status
from hpcroll.spool import BeatCounts, EventLog, mark_ended, read_events
from tests.spools import TWO_LEGS, count_operations, make_spool, start_worker, submit


def test_heartbeats_of_the_living_and_the_dead_are_summed(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=10, samples=2)
    living, dead, mute = (start_worker(spool, rank=rank) for rank in range(3))
    counts = BeatCounts(
        stages={Stage.RUN: 3}, statuses={Status.COMPLETED: 5}, failures={FailureClass.TASK: 1}
    )
    living.heartbeat.beat(counts)
    dead.heartbeat.beat(counts)
    mark_ended(spool.paths, dead.id, status=-9)
    found = spool.counts()
    assert found.total == 20
    assert found.committed == 10
    assert found.statuses == {Status.COMPLETED: 10}
    assert found.failures == {FailureClass.TASK: 2}
    assert found.stages == {Stage.RUN: 3}, "a dead worker runs nothing"
    assert found.alive == 2
    assert {worker.info.incarnation: worker.beat is None for worker in found.workers} == {
        living.id: False,
        dead.id: False,
        mute.id: True,
    }


def test_counting_from_heartbeats_touches_no_rollout(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=50, samples=4)
    worker = start_worker(spool)
    for claim in worker.drain()[:100]:
        claim.link_done()
    worker.beat()
    spool.segments()
    with count_operations(tmp_path) as operations:
        spool.counts()
    assert len(operations) <= 4
    assert not [path for _, path in operations if path.startswith(("claims", "done"))]


def test_exact_counts_follow_the_names(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    submit(spool, tasks=3, samples=2)
    worker = start_worker(spool)
    claims = worker.drain()
    for claim in claims[:2]:
        worker.commit(claim)
    worker.commit(claims[2], final=True)
    claims[3].release()
    found = spool.exact_counts()
    assert found.total == 6
    assert found.done == {"init+run": 3, "eval": 1}
    assert found.running == {"init+run": 2, "eval": 0}
    assert found.attempts == {"init+run": 6, "eval": 0}


def test_events_are_read_back_in_order_without_a_torn_line(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    one, other = start_worker(spool, rank=0), start_worker(spool, rank=1)
    with EventLog(one.incarnation) as log:
        log.write("claimed", rollout="a/1", attempt=1)
        log.write("stage.begin", stage=Stage.INIT, text="line\nbreak \udc80")
    with EventLog(other.incarnation) as log:
        log.write("claimed", rollout="a/2", attempt=1)
    path = spool.paths.events_file(one.id)
    path.write_bytes(path.read_bytes() + b'{"event":"torn","monoto')
    events = list(read_events(spool.paths, one.id))
    assert [event.event for event in events] == ["claimed", "stage.begin"]
    assert events[0].fields == {"rollout": "a/1", "attempt": 1}
    assert events[0].monotonic_s <= events[1].monotonic_s
    assert {event.incarnation for event in read_events(spool.paths)} == {one.id, other.id}
