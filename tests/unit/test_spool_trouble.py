"""A full disk and answers that never came cost time, and are made good."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcroll.contract import EndReason, Failure, RolloutRef
from hpcroll.errors import SpoolError, UnsafeFilesystemError
from hpcroll.fs import claim_name, list_names
from hpcroll.spool import Claim, EventLog, Spool, read_end, read_events
from tests.spools import Worker, check_exactly_one_result, make_spool, start_worker, submit, wait_until


def failing(code: int) -> Callable[..., bool]:
    def fail(*args: object, **keywords: object) -> bool:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return make_spool(tmp_path, beat_s=0.02)


@pytest.fixture
def ref(spool: Spool) -> RolloutRef:
    return submit(spool, tasks=1, samples=1).refs[0]


def claim_in_the_end(worker: Worker) -> Claim:
    found: list[Claim] = []

    def try_again() -> bool:
        claim = worker.claims.next()
        found.extend([claim] if claim is not None else [])
        return bool(found)

    wait_until(try_again, "the rollout is claimed")
    return found[0]


def test_claim_on_a_full_disk_says_so_and_succeeds_later(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(spool)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.incarnation.claim_name", failing(errno.ENOSPC))
        with pytest.raises(SpoolError, match=f"rollout {ref} cannot be claimed: No space left") as caught:
            worker.claims.next()
    assert str(spool.paths.root) in str(caught.value)
    assert claim_in_the_end(worker).attempt == 1


def test_claim_without_an_answer_is_asked_again(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(spool)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.incarnation.claim_name", failing(errno.EIO))
        assert worker.claims.next() is None
    claim = claim_in_the_end(worker)
    assert (claim.rollout.ref, claim.attempt) == (ref, 1)


def test_claim_that_took_effect_after_its_error_is_found(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a soft mount does: the caller is told EIO, and the server makes the name later."""
    worker = start_worker(spool)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.incarnation.claim_name", failing(errno.EIO))
        assert worker.claims.next() is None
    assert claim_name(worker.incarnation.token_file, spool.paths.claim_link("init+run+eval", ref, 1))
    claim = claim_in_the_end(worker)
    assert claim.attempt == 1
    assert worker.commit(claim)
    assert check_exactly_one_result(spool) == {worker.id: 1}


def test_claim_without_an_answer_that_another_got_is_left_to_it(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = start_worker(spool), start_worker(spool)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.incarnation.claim_name", failing(errno.EIO))
        assert worker.claims.next() is None
    assert other.commit(other.claim())
    wait_until(lambda: worker.claims.next() is None and worker.claims.finished(), "it sees that it is done")


@pytest.mark.parametrize("how", ["release", "fail"])
def test_end_that_cannot_be_written_is_written_later(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    worker = start_worker(spool)
    claim = worker.claim()
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.claim.write_end", failing(errno.ENOSPC))
        ended = claim.release() if how == "release" else claim.fail(_failure())
        assert not ended
        assert worker.claims.next() is None, "the attempt is still ours"
    end_file = spool.paths.end_file(claim.leg, ref, 1)

    def is_ended() -> bool:
        worker.claims.next()
        return read_end(end_file) is not None

    wait_until(is_ended, "the end is written")
    end = read_end(end_file)
    assert end is not None
    assert end.failure.reason is (EndReason.RELEASED if how == "release" else EndReason.INFRA)


def test_commit_on_a_full_disk_says_so_and_may_be_repeated(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(spool)
    claim = worker.claim()
    worker.write_result(claim)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.incarnation.claim_name", failing(errno.ENOSPC))
        with pytest.raises(SpoolError, match=f"rollout {ref} attempt 1: its result is written but"):
            claim.link_done()
    assert not spool.is_done(ref)
    assert claim.commit()
    assert check_exactly_one_result(spool) == {worker.id: 1}


def _failure() -> Failure:
    return Failure(attempt=1, reason=EndReason.INFRA, message="no node")


def test_claim_whose_history_cannot_be_read_is_found_again(
    spool: Spool, ref: RolloutRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker(spool).claim().release()
    worker = start_worker(spool)
    with monkeypatch.context() as patch:
        patch.setattr("hpcroll.spool.claims.read_end", failing(errno.ESTALE))
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            worker.claims.next()
    claim = claim_in_the_end(worker)
    assert claim.attempt == 2
    assert [failure.reason for failure in claim.failures] == [EndReason.RELEASED]


def test_events_that_could_not_be_written_are_counted(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start_worker(spool)
    with EventLog(worker.incarnation) as log:
        log.write("one")
        with monkeypatch.context() as patch:
            patch.setattr("hpcroll.spool.events.write_all", failing(errno.ENOSPC))
            log.write("two")
            log.write("three")
        log.write("four")
    events = list(read_events(spool.paths, worker.id))
    assert [event.event for event in events] == ["one", "dropped", "four"]
    assert events[1].fields == {"events": 2}


def test_worker_whose_mount_is_unsafe_does_not_register(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise UnsafeFilesystemError(f"{directory} has no links")

    monkeypatch.setattr("hpcroll.spool.incarnation.probe_filesystem", refuse)
    with pytest.raises(UnsafeFilesystemError):
        start_worker(spool)
    assert list_names(spool.paths.workers) == []
