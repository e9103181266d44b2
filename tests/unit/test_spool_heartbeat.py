"""A heartbeat is whole or not there, of one size, whatever it tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.contract import FailureClass, Stage, Status
from hpcroll.spool import BeatCounts, Heartbeat, Incarnation, read_beat
from hpcroll.spool.heartbeat import BEAT_BYTES
from tests.spools import make_spool

COUNTS = BeatCounts(
    stages={Stage.RUN: 8, Stage.EVAL: 2},
    statuses={Status.COMPLETED: 123_456, Status.FAILED: 1},
    failures={FailureClass.INFRA: 3},
    last_failure="rollout 12/3: SandboxError: no space",
)


@pytest.fixture
def incarnation(tmp_path: Path) -> Incarnation:
    return Incarnation.register(make_spool(tmp_path), leg="init+run+eval", rank=0)


def test_heartbeat_reads_back(incarnation: Incarnation) -> None:
    heartbeat = Heartbeat(incarnation)
    heartbeat.beat(BeatCounts())
    heartbeat.beat(COUNTS)
    beat = read_beat(incarnation.paths.beat_file(incarnation.id))
    assert beat is not None
    assert beat.counter == 2
    assert (beat.stages, beat.statuses) == (COUNTS.stages, COUNTS.statuses)
    assert (beat.failures, beat.last_failure) == (COUNTS.failures, COUNTS.last_failure)


@pytest.mark.parametrize(
    "text", ["", "x" * 100_000, "\U0001f600" * 5_000, '\x00\n"\\' * 5_000, "lone \udc80 half", "\u00e9" * 999]
)
def test_heartbeat_has_one_size_whatever_it_says(incarnation: Incarnation, text: str) -> None:
    full = dict.fromkeys(Status, 10**12)
    counts = BeatCounts(
        stages=dict.fromkeys(Stage, 10**6),
        statuses=full,
        failures=dict.fromkeys(FailureClass, 10**12),
        last_failure=text,
    )
    Heartbeat(incarnation).beat(counts)
    path = incarnation.paths.beat_file(incarnation.id)
    assert path.stat().st_size == BEAT_BYTES
    beat = read_beat(path)
    assert beat is not None
    assert beat.last_failure == text[: len(beat.last_failure)].replace("\udc80", "?")


def test_every_beat_differs_from_the_one_before(incarnation: Incarnation) -> None:
    heartbeat, path = Heartbeat(incarnation), incarnation.paths.beat_file(incarnation.id)
    seen = set()
    for _ in range(10):
        heartbeat.beat(BeatCounts())
        seen.add(path.read_bytes())
    assert len(seen) == 10


def test_half_a_heartbeat_is_none(incarnation: Incarnation) -> None:
    Heartbeat(incarnation).beat(COUNTS)
    path = incarnation.paths.beat_file(incarnation.id)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", whole[:40] + b"9" + whole[41:], b"0" * BEAT_BYTES):
        path.write_bytes(damaged)
        assert read_beat(path) is None


def test_worker_that_never_beat_has_no_heartbeat(incarnation: Incarnation) -> None:
    assert read_beat(incarnation.paths.beat_file(incarnation.id)) is None


def test_heartbeat_that_cannot_be_written_raises_and_does_not_count_as_written(
    incarnation: Incarnation,
) -> None:
    heartbeat = Heartbeat(incarnation)
    heartbeat.beat(BeatCounts())
    incarnation.paths.beats.rename(incarnation.paths.root / "gone")
    before_s = incarnation.pulse.good_s
    with pytest.raises(FileNotFoundError):
        heartbeat.beat(BeatCounts())
    assert incarnation.pulse.good_s == before_s
