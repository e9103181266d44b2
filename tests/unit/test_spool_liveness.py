"""Who counts as gone: by word, by the scheduler, or by a silence that the observer could have heard."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.config import LeaseConfig
from hpcroll.contract import EndReason
from hpcroll.spool import BeatCounts, Heartbeat, Incarnation, Spool, WorkerInfo, mark_ended
from hpcroll.spool.liveness import WATCHED, JobEnded, Liveness
from hpcroll.spool.pulse import Pulse
from tests.clock import Clock
from tests.spools import count_operations, make_spool, unknown_job

BEAT_S, SILENCE_S = 10.0, 60.0


class Observer:
    """One incarnation that watches another, on a clock of its own."""

    def __init__(self, spool: Spool, job_ended: JobEnded = unknown_job) -> None:
        self.clock = Clock()
        self.incarnation = Incarnation.register(spool, leg="init+run+eval", rank=0)
        self.incarnation.pulse = Pulse(BEAT_S, clock=self.clock)
        self.heartbeat = Heartbeat(self.incarnation)
        lease = LeaseConfig(beat_s=BEAT_S, silence_s=SILENCE_S)
        self.liveness = Liveness(self.incarnation, lease, job_ended=job_ended, clock=self.clock)

    def pass_time(self, seconds: float, *, step_s: float = BEAT_S) -> None:
        """Beats and looks every `step_s` seconds."""
        for _ in range(int(seconds / step_s)):
            self.clock.now_s += step_s
            self.heartbeat.beat(BeatCounts())
            self.liveness.look()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return make_spool(tmp_path, beat_s=BEAT_S, silence_s=SILENCE_S)


@pytest.fixture
def subject(spool: Spool) -> Incarnation:
    return Incarnation.register(spool, leg="init+run+eval", rank=1)


def test_silent_worker_is_gone_after_the_lease_and_not_before(spool: Spool, subject: Incarnation) -> None:
    Heartbeat(subject).beat(BeatCounts())
    observer = Observer(spool)
    observer.pass_time(SILENCE_S)
    assert observer.liveness.gone(subject.id) is None
    observer.pass_time(3 * BEAT_S)
    assert observer.liveness.gone(subject.id) is EndReason.SILENCE


def test_worker_that_never_beat_is_gone_after_the_lease(spool: Spool, subject: Incarnation) -> None:
    observer = Observer(spool)
    observer.pass_time(SILENCE_S + 3 * BEAT_S)
    assert observer.liveness.gone(subject.id) is EndReason.SILENCE


def test_beating_worker_is_never_gone(spool: Spool, subject: Incarnation) -> None:
    observer, heartbeat = Observer(spool), Heartbeat(subject)
    for _ in range(20):
        heartbeat.beat(BeatCounts())
        observer.pass_time(SILENCE_S / 2)
        assert observer.liveness.gone(subject.id) is None


def test_worker_that_beats_again_is_alive_again(spool: Spool, subject: Incarnation) -> None:
    observer = Observer(spool)
    observer.pass_time(10 * SILENCE_S)
    assert observer.liveness.gone(subject.id) is EndReason.SILENCE
    Heartbeat(subject).beat(BeatCounts())
    observer.pass_time(BEAT_S)
    assert observer.liveness.gone(subject.id) is None


def test_stalled_server_makes_nobody_silent(spool: Spool, subject: Incarnation) -> None:
    """The observer's own heartbeats were late as well: it could not have heard the other's."""
    observer = Observer(spool)
    observer.pass_time(100 * SILENCE_S, step_s=3 * BEAT_S)
    assert observer.liveness.gone(subject.id) is None


def test_observer_that_does_not_beat_calls_nobody_silent(spool: Spool, subject: Incarnation) -> None:
    observer = Observer(spool)
    for _ in range(1_000):
        observer.clock.now_s += BEAT_S
        observer.liveness.look()
    assert observer.liveness.gone(subject.id) is None


def test_silence_is_counted_on_over_a_stall(spool: Spool, subject: Incarnation) -> None:
    observer = Observer(spool)
    observer.pass_time(SILENCE_S)
    observer.pass_time(10 * SILENCE_S, step_s=SILENCE_S)
    assert observer.liveness.gone(subject.id) is None
    observer.pass_time(3 * BEAT_S)
    assert observer.liveness.gone(subject.id) is EndReason.SILENCE


def test_word_of_the_parent_is_believed_at_once(spool: Spool, subject: Incarnation) -> None:
    observer = Observer(spool)
    observer.pass_time(BEAT_S)
    mark_ended(spool.paths, subject.id, status=-9)
    observer.pass_time(BEAT_S)
    assert observer.liveness.gone(subject.id) is EndReason.KILL


@pytest.mark.parametrize(("answer", "gone"), [(True, EndReason.KILL), (False, None), (None, None)])
def test_scheduler_is_asked_about_a_worker_that_missed_beats(
    spool: Spool, subject: Incarnation, answer: bool | None, gone: EndReason | None
) -> None:
    asked: list[str] = []

    def job_ended(info: WorkerInfo) -> bool | None:
        asked.append(info.incarnation)
        return answer

    observer = Observer(spool, job_ended)
    observer.pass_time(BEAT_S)
    assert asked == []
    observer.pass_time(4 * BEAT_S)
    assert set(asked) == {subject.id}
    assert observer.liveness.gone(subject.id) is gone


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
def test_clocks_an_hour_apart_change_nothing(
    spool: Spool, subject: Incarnation, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    observer, heartbeat = Observer(spool), Heartbeat(subject)
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1_800_000_000.0 + offset_s)
        heartbeat.beat(BeatCounts())
    observer.pass_time(SILENCE_S)
    assert observer.liveness.gone(subject.id) is None
    observer.pass_time(3 * BEAT_S)
    assert observer.liveness.gone(subject.id) is EndReason.SILENCE


def test_looking_costs_one_listing_and_one_read_per_living_worker(spool: Spool) -> None:
    others = [Incarnation.register(spool, leg="init+run+eval", rank=rank) for rank in range(5)]
    observer = Observer(spool)
    observer.pass_time(BEAT_S)
    for other in others[:3]:
        mark_ended(spool.paths, other.id)
    observer.pass_time(BEAT_S)
    reads: list[Path] = []

    def read(path: Path) -> bytes | None:
        reads.append(path)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcroll.spool.liveness.read_fresh", read)
        observer.pass_time(BEAT_S)
        for _ in range(100):
            observer.liveness.look()
    assert len(reads) == 2


def test_places_are_shared_out_among_the_living_of_a_leg(spool: Spool, subject: Incarnation) -> None:
    observer = Observer(spool)
    Incarnation.register(spool, leg="other", rank=2)
    observer.pass_time(BEAT_S)
    place, places = observer.liveness.place()
    assert places == 2
    assert place == sorted([observer.incarnation.id, subject.id]).index(observer.incarnation.id)
    mark_ended(spool.paths, subject.id)
    observer.pass_time(BEAT_S)
    assert observer.liveness.place() == (0, 1)


def test_each_of_many_workers_watches_a_few_and_every_one_is_watched(spool: Spool) -> None:
    observers = [Observer(spool) for _ in range(3 * WATCHED)]
    watched: dict[str, int] = {}
    for observer in observers:
        with count_operations(spool.paths.root) as operations:
            observer.clock.now_s += BEAT_S
            observer.liveness.look()
        beats = [path for event, path in operations if event == "open" and path.startswith("beats/")]
        assert len(beats) == WATCHED
        for path in beats:
            watched[path] = watched.get(path, 0) + 1
    assert len(watched) == len(observers)
    assert set(watched.values()) == {WATCHED}


def test_dead_neighbours_do_not_hide_those_behind_them(spool: Spool) -> None:
    """A rack that died without a word fills the ring; in the end all of it is found silent."""
    dead = [Incarnation.register(spool, leg="init+run+eval", rank=rank) for rank in range(2 * WATCHED + 3)]
    observer = Observer(spool)
    observer.pass_time(4 * (SILENCE_S + 3 * BEAT_S))
    assert {observer.liveness.gone(worker.id) for worker in dead} == {EndReason.SILENCE}


def test_command_that_died_is_found_by_workers_of_every_leg(spool: Spool) -> None:
    command = Incarnation.register(spool, leg="init+run+eval", rank=0, role="cancel")
    observer = Observer(spool)
    observer.pass_time(SILENCE_S + 3 * BEAT_S)
    assert observer.liveness.gone(command.id) is EndReason.SILENCE
    assert observer.liveness.place() == (0, 1), "it takes no place among the workers"
