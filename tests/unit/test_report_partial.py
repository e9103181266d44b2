"""A rollout without a result is read from the journal of its latest attempt, and marked."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.cli.main import run as command
from hpcroll.contract import EndReason, Failure, RecordedCall, RolloutRef
from hpcroll.errors import ConfigError
from hpcroll.gateway import Journal
from hpcroll.spool import Spool
from hpcroll.trajectory import check
from tests.call_graphs import imagine
from tests.spools import make_spool, start_worker, submit

CALLS = imagine(5, [("retry", 0), ("compact", 0), ("aside", 0)]).calls


def journal(spool: Spool, incarnation: str, ref: RolloutRef, attempt: int) -> Path:
    """Journals `CALLS` as those of an attempt."""

    async def write() -> None:
        writer = Journal(spool.paths.journal_file(incarnation))
        writer.open()
        for recorded in CALLS:
            update = {"rollout_id": ref.rollout_id, "attempt": attempt}
            await writer.append(RecordedCall(recorded.call.model_copy(update=update), recorded.tokens))
        await writer.close()

    asyncio.run(write())
    return spool.paths.journal_file(incarnation)


def test_attempt_under_way_is_shown_as_far_as_its_journal_goes(tmp_path: Path) -> None:
    spool = make_spool(tmp_path / "run")
    [ref, *_] = submit(spool, 1, samples=1).refs
    run = Run.open(spool.paths.root)
    with pytest.raises(ConfigError, match="no committed result yet and no attempt"):
        run.partial_trajectory(ref.rollout_id)
    worker = start_worker(spool)
    claim = worker.claim()
    with pytest.raises(ConfigError, match="no model call in a journal yet"):
        run.partial_trajectory(ref.rollout_id)
    path = journal(spool, worker.id, ref, claim.attempt)
    whole = run.look_up(ref.rollout_id)
    assert len(whole.record.calls) == len(CALLS)
    assert "has not ended" in str(whole.record.partial)
    assert (whole.record.trainable, whole.record.reward) == (False, None)
    assert check(whole) == ()
    os.truncate(path, path.stat().st_size - 5)
    cut = run.look_up(ref.rollout_id)
    assert len(cut.record.calls) == len(CALLS) - 1
    assert check(cut) == ()


def test_latest_attempt_that_made_calls_is_shown_with_how_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path / "run")
    [ref, *_] = submit(spool, 1, samples=1).refs
    first = start_worker(spool)
    claim = first.claim()
    journal(spool, first.id, ref, claim.attempt)
    claim.fail(Failure(attempt=1, reason=EndReason.INFRA, error="OSError", message="the disk is full"))
    second = start_worker(spool)
    assert second.claim().attempt == 2
    shown = Run.open(spool.paths.root).look_up(ref.rollout_id)
    assert shown.record.attempt == 1
    assert "infra: OSError: the disk is full" in str(shown.record.partial)
    assert command(["show", str(spool.paths.root), ref.rollout_id]) == 0
    assert "PARTIAL: attempt 1" in capsys.readouterr().out
    assert command(["show", str(spool.paths.root), ref.rollout_id, "--attempt", "3"]) == 2
    assert "no attempt 3" in capsys.readouterr().err


def test_damage_in_the_middle_of_a_journal_is_named_and_what_stands_before_it_is_shown(
    tmp_path: Path,
) -> None:
    spool = make_spool(tmp_path / "run")
    [ref, *_] = submit(spool, 1, samples=1).refs
    worker = start_worker(spool)
    path = journal(spool, worker.id, ref, worker.claim().attempt)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    shown = Run.open(spool.paths.root).look_up(ref.rollout_id)
    assert 0 < len(shown.record.calls) < len(CALLS)
    assert any("damaged" in gap for gap in shown.record.gaps)
