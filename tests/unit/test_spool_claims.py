"""What is claimed, in which order, and what is left alone."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from hpcroll.contract import EndReason, Failure, FailureClass
from hpcroll.spool import Claim, Claims, mark_ended
from hpcroll.spool.attempts import write_end
from hpcroll.spool.board import WINDOW_ROLLOUTS
from tests.spools import (
    TWO_LEGS,
    Worker,
    check_exactly_one_result,
    count_operations,
    make_spool,
    start_worker,
    submit,
    unknown_job,
    wait_until,
)


def failed(reason: EndReason = EndReason.INFRA, message: str = "no node") -> Failure:
    return Failure(attempt=1, reason=reason, message=message)


def ordinals(claims: list[Claim]) -> list[int]:
    return [claim.rollout.ref.ordinal for claim in claims]


def claim_until(worker: Worker, ordinal: int) -> Claim:
    """Claims until rollout `ordinal` is ours."""
    while True:
        claim = worker.claim()
        if claim.rollout.ref.ordinal == ordinal:
            return claim


def claim_anew(worker: Worker) -> Claim:
    """The next claim of a worker that sees what happened a moment ago."""
    fresh = Claims(worker.spool, worker.incarnation, job_ended=unknown_job)
    claim = fresh.next()
    assert claim is not None
    return claim


def test_every_rollout_is_claimed_once_and_committed(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submission = submit(spool, tasks=20, samples=3)
    worker = start_worker(spool)
    claims = worker.drain()
    assert sorted(ordinals(claims)) == list(range(60))
    assert all(worker.commit(claim) for claim in claims)
    assert worker.claims.finished()
    assert check_exactly_one_result(spool) == {worker.id: 60}
    assert submission.segment.size == 60


def test_two_workers_share_without_meeting_twice(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=20, samples=3)
    workers = [start_worker(spool, rank=rank) for rank in range(2)]
    claims: list[Claim] = []
    while True:
        found = [claim for worker in workers if (claim := worker.claims.next()) is not None]
        if not found:
            break
        claims += found
    assert sorted(ordinals(claims)) == list(range(60))
    assert {claim.attempt for claim in claims} == {1}


def test_order_and_groups_are_kept_within_a_window(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=50, samples=8)
    workers = [start_worker(spool, rank=rank) for rank in range(4)]
    claimed: list[int] = []
    for turn in range(400):
        claimed.append(workers[turn % 4].claim().rollout.ref.ordinal)
        passed_over = set(range(claimed[-1])) - set(claimed)
        assert len(passed_over) < WINDOW_ROLLOUTS + 8
    assert sorted(claimed) == list(range(400))
    spans = [[turn for turn, n in enumerate(claimed) if n // 8 == group] for group in range(50)]
    assert statistics.median(span[-1] - span[0] for span in spans) < 2 * WINDOW_ROLLOUTS


def test_earlier_submissions_come_first(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=40, samples=1, key="first")
    submit(spool, tasks=40, samples=1, key="second")
    keys = [spool.segment(claim.rollout.ref.segment).key for claim in start_worker(spool).drain()]
    assert keys.index("second") >= 40 - WINDOW_ROLLOUTS
    assert len(keys) == 80


def test_new_submission_is_found_by_a_worker_that_had_nothing(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    worker = start_worker(spool)
    assert worker.claims.next() is None
    assert worker.claims.finished()
    submit(spool)
    assert len(worker.drain()) == 8
    assert not worker.claims.finished()


def test_rollout_that_was_taken_from_us_is_not_claimed_while_we_run_it(tmp_path: Path) -> None:
    """Two attempts of one incarnation at once: nobody could tell which of them a later leg starts from."""
    spool = make_spool(tmp_path)
    ref = submit(spool, tasks=1, samples=1).refs[0]
    worker = start_worker(spool)
    claim = worker.claim()
    end = spool.paths.end_file(claim.leg, ref, 1)
    write_end(end, failed(EndReason.SILENCE), ended_by="a taker that thinks us dead")
    with count_operations(spool.paths.claims) as operations:
        while len(operations) < 3:
            assert worker.claims.next() is None, "it sees the end in the listing, and lets the rollout be"
    assert not claim.still_mine()
    wait_until(lambda: (again := worker.claims.next()) is not None and again.attempt == 2, "it tries again")


def test_released_rollout_is_startable_and_spends_no_retry(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, attempts={"infra": 1, "task": 1, "policy": 1, "kill": 1, "silence": 1})
    submit(spool, tasks=1, samples=1)
    for attempt in range(1, 6):
        claim = start_worker(spool).claim()
        assert claim.attempt == attempt
        assert claim.poisoned is None
        assert [failure.reason for failure in claim.failures] == [EndReason.RELEASED] * (attempt - 1)
        assert claim.still_mine()
        assert claim.release()
        assert not claim.still_mine()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (EndReason.TASK, FailureClass.TASK),
        (EndReason.INFRA, FailureClass.INFRA),
        (EndReason.POLICY, FailureClass.POLICY),
        (EndReason.KILL, FailureClass.KILL),
        (EndReason.SILENCE, FailureClass.KILL),
    ],
)
def test_rollout_past_the_cap_of_a_class_is_poisoned_with_every_reason(
    tmp_path: Path, reason: EndReason, kind: FailureClass
) -> None:
    caps = {"task": 9, "infra": 9, "policy": 9, "kill": 9, "silence": 9, str(reason): 2}
    spool = make_spool(tmp_path, attempts=caps)
    submit(spool, tasks=1, samples=1)
    for attempt in (1, 2):
        claim = start_worker(spool).claim()
        assert claim.poisoned is None
        claim.fail(failed(reason, f"number {attempt}"))
    claim = start_worker(spool).claim()
    assert claim.attempt == 3
    assert claim.poisoned is kind
    assert claim.cause == claim.failures[-1]
    assert [failure.message for failure in claim.failures] == ["number 1", "number 2"]
    assert [failure.attempt for failure in claim.failures] == [1, 2]
    assert all(failure.incarnation for failure in claim.failures)


def test_first_word_on_an_attempt_stays(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=1, samples=1)
    claim = start_worker(spool).claim()
    claim.fail(failed(message="first"))
    claim.release()
    assert [failure.message for failure in start_worker(spool).claim().failures] == ["first"]


def test_failed_rollout_is_offered_to_its_own_worker_again(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=1, samples=1)
    worker = start_worker(spool)
    worker.claim().fail(failed())
    claim = claim_anew(worker)
    assert claim.attempt == 2
    assert worker.commit(claim)


def test_incarnation_that_wrote_a_record_never_claims_the_rollout_again(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=1, samples=1)
    worker = start_worker(spool)
    claim = worker.claim()
    worker.write_result(claim)
    claim.fail(failed(message="the disk filled before its name was linked"))
    wait_until(
        lambda: worker.claims.next() is None and worker.claims.needs_successor, "only a successor may go on"
    )
    successor = worker.incarnation.successor()
    assert successor.info.predecessor == worker.id
    again = Claims(spool, successor, job_ended=unknown_job).next()
    assert again is not None
    assert again.attempt == 2


def test_held_segments_wait_and_resume(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    held = submit(spool, key="held").segment
    submit(spool, key="free")
    spool.wishes.hold(held.name)
    worker = start_worker(spool)
    assert {claim.rollout.ref.segment for claim in worker.drain()} == {spool.segments()[1].name}
    assert not worker.claims.finished()
    spool.wishes.resume(held.name)
    assert len(worker.drain()) == 8


def test_draining_worker_and_closed_run_start_nothing(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool)
    one, other = start_worker(spool), start_worker(spool)
    spool.wishes.drain(one.id)
    assert one.claims.next() is None
    assert other.claims.next() is not None
    spool.wishes.close()
    assert other.claims.next() is None
    assert other.claims.finished()


def test_cancelled_rollouts_are_handed_out_as_such(tmp_path: Path) -> None:
    """Any worker commits their records, so that no trainer waits if the cancelling command dies."""
    spool = make_spool(tmp_path)
    segment = submit(spool, tasks=4, samples=2).segment
    spool.wishes.cancel(segment=segment.name, group=1)
    spool.wishes.cancel(segment=segment.name, ordinal=6)
    claims = start_worker(spool).drain()
    assert {claim.rollout.ref.ordinal for claim in claims if claim.cancelled} == {2, 3, 6}
    assert len(claims) == 8


def test_cancelling_command_commits_what_nobody_runs(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    segment = submit(spool, tasks=4, samples=2).segment
    worker = start_worker(spool)
    running = claim_until(worker, 3)
    spool.wishes.cancel(segment=segment.name)
    cancelled = list(start_worker(spool).claims.cancelled())
    assert all(claim.cancelled for claim in cancelled)
    assert 3 not in ordinals(cancelled)
    assert spool.exact_counts().attempts == {"init+run+eval": 8}
    assert spool.is_cancelled(running.rollout.ref), "its worker sees it and commits it"


def test_cancelling_command_takes_what_a_dead_worker_ran(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    submit(spool, tasks=2, samples=1)
    dead = start_worker(spool)
    dead.drain()
    mark_ended(spool.paths, dead.id, status=-9)
    spool.wishes.cancel()
    command = start_worker(spool)
    assert [claim.attempt for claim in command.claims.cancelled()] == [2, 2]


def test_cancelling_one_group_touches_no_other(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    segment = submit(spool, tasks=4, samples=2).segment
    spool.wishes.cancel(segment=segment.name, group=2)
    assert sorted(ordinals(list(start_worker(spool).claims.cancelled()))) == [4, 5]


def test_later_leg_starts_what_the_earlier_has_done_with_its_bundle(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    submit(spool, tasks=4, samples=1)
    runner, grader = start_worker(spool), start_worker(spool, leg="eval")
    assert grader.claims.next() is None
    for claim in runner.drain()[:2]:
        assert runner.commit(claim)
    fresh = start_worker(spool, leg="eval")
    for claim in fresh.drain():
        assert claim.previous_attempt == 1
        bundle = spool.paths.bundle_file("init+run", claim.rollout.ref, claim.previous_attempt)
        assert bundle.read_text() == f"{claim.rollout.ref} 1"
        assert fresh.commit(claim)
    assert spool.exact_counts().done == {"init+run": 2, "eval": 2}
    assert grader.id != fresh.id


def test_later_leg_gets_the_bundle_of_the_attempt_that_won(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    submit(spool, tasks=1, samples=1)
    one = start_worker(spool)
    first = one.claim()
    first.release()
    other = start_worker(spool)
    second = other.claim()
    other.write_result(second)
    second.fail(failed(message="thought to be dead"))
    third = start_worker(spool)
    last = third.claim()
    assert (first.attempt, second.attempt, last.attempt) == (1, 2, 3)
    third.write_result(last)
    assert second.commit(), "a paused attempt that links first wins"
    assert not last.commit()
    claim = start_worker(spool, leg="eval").claim()
    assert claim.previous_attempt == 2


def test_latest_claim_of_the_winner_is_the_one_that_won(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    submit(spool, tasks=1, samples=1)
    worker = start_worker(spool)
    worker.claim().fail(failed())
    claim = claim_anew(worker)
    assert worker.commit(claim)
    assert start_worker(spool, leg="eval").claim().previous_attempt == 2


def test_terminal_end_in_an_early_leg_ends_every_leg(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    submit(spool, tasks=2, samples=1)
    runner = start_worker(spool)
    for claim in runner.drain():
        assert runner.commit(claim, final=True)
    grader = start_worker(spool, leg="eval")
    assert grader.claims.next() is None
    assert grader.claims.finished()
    assert check_exactly_one_result(spool) == {runner.id: 2}


def test_half_made_terminal_end_is_completed_by_the_next_leg(tmp_path: Path) -> None:
    """Its committer died after it linked `done` of its own leg: the record is durable and counts."""
    spool = make_spool(tmp_path, legs=TWO_LEGS)
    ref = submit(spool, tasks=1, samples=1).refs[0]
    runner = start_worker(spool)
    claim = runner.claim()
    runner.write_result(claim, final=True)
    assert runner.incarnation.claim(spool.paths.done_link("init+run", ref), final=True)
    assert not spool.is_done(ref)
    grader = start_worker(spool, leg="eval")
    assert grader.claims.next() is None
    assert grader.claims.finished()
    assert check_exactly_one_result(spool) == {runner.id: 1}


def test_idle_worker_leaves_the_file_system_alone(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, beat_s=1000.0, silence_s=6000.0)
    submit(spool, tasks=600, samples=8)
    worker = start_worker(spool)
    claims = worker.drain()
    assert len(claims) == 4_800
    with count_operations(tmp_path) as operations:
        for _ in range(1_000):
            assert worker.claims.next() is None
    per_directory = [
        path for event, path in operations if event == "os.listdir" and path.startswith("claims")
    ]
    assert len(operations) < 100, "bounded by time, not by calls or rollouts"
    assert len(per_directory) <= 3 * 5


def test_claim_and_commit_cost_at_most_six_names(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, beat_s=1000.0, silence_s=6000.0)
    submit(spool, tasks=100, samples=4)
    worker = start_worker(spool)
    with count_operations(tmp_path) as operations:
        for _ in range(400):
            claim = worker.claim()
            claim.note_record()
            assert claim.still_mine()
            assert claim.link_done()
    assert len(operations) / 400 < 3.1, "a link, a look for `.end`, a link"


def test_claim_and_commit_of_a_later_leg_cost_at_most_six_names(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, legs=TWO_LEGS, beat_s=1000.0, silence_s=6000.0)
    submit(spool, tasks=100, samples=4)
    runner, grader = start_worker(spool), start_worker(spool, leg="eval")
    for claim in runner.drain():
        assert claim.link_done()
    with count_operations(tmp_path) as operations:
        for _ in range(400):
            claim = grader.claim()
            claim.note_record()
            assert claim.still_mine()
            assert claim.link_done()
    assert len(operations) / 400 < 6.1
