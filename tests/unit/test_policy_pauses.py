"""A pause is durable, has one order for all, waits for live workers alone, and ends by itself."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths, make_directories
from hpcroll.policy import AdmissionState, Gate, PauseMode, Pauses, PolicyRegistry
from hpcroll.policy.gates import GateWatch


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    make_directories([paths.workers, paths.beats, paths.policy])  # as runs of before have it
    return paths


def put(pauses: Pauses, name: str, *, max_s: float = 60.0) -> int:
    return pauses.put(name, mode=PauseMode.CUT, drain_s=1.0, max_s=max_s).serial


class Worker(threading.Thread):
    """Does in time what a gateway does: sees the state and says so."""

    def __init__(self, paths: RunPaths, name: str, *, in_flight: int = 0) -> None:
        super().__init__(daemon=True)
        self.pauses, self.gate = Pauses(paths), Gate(paths, name, silence_s=60)
        self.in_flight = in_flight
        self.gate.report(0, 0)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            state = self.pauses.read()
            self.gate.report(state.generation, self.in_flight if state.pauses else 0)


def test_pause_with_no_workers_is_complete_at_once(paths: RunPaths) -> None:
    outcome = PolicyRegistry(paths).pause(timeout_s=30)
    assert outcome.complete
    assert [pause.name for pause in PolicyRegistry(paths).pauses()] == ["trainer"]
    assert PolicyRegistry(paths).resume()
    assert not PolicyRegistry(paths).resume()
    assert PolicyRegistry(paths).pauses() == ()


def test_pause_returns_when_every_worker_has_acted(paths: RunPaths) -> None:
    workers = [Worker(paths, f"w{number}") for number in range(3)]
    workers[0].in_flight = 2
    for worker in workers:
        worker.start()
    drained = threading.Timer(0.5, lambda: setattr(workers[0], "in_flight", 0))
    drained.start()
    outcome = PolicyRegistry(paths).pause(timeout_s=30)
    assert not drained.is_alive(), "it waited for the calls in flight"
    assert outcome.complete
    for worker in workers:
        worker.ended.set()
        worker.join()


def test_pause_says_who_has_not_acted_in_time(paths: RunPaths) -> None:
    busy = Worker(paths, "busy", in_flight=3)
    busy.start()
    Gate(paths, "blind", silence_s=60).report(0, 0)
    registry = PolicyRegistry(paths)
    outcome = registry.pause(timeout_s=0.5)
    assert outcome.waiting == {"busy": "has 3 calls in flight", "blind": "has not seen the pause yet"}
    kept = registry.pause(timeout_s=0.5, mode="keep")
    assert kept.waiting == {"blind": "has not seen the pause yet"}
    busy.ended.set()
    busy.join()


def test_dead_workers_are_not_waited_for(paths: RunPaths) -> None:
    now = [0.0]
    watch = GateWatch(paths, clock=lambda: now[0])
    for name in ("ended", "left", "silent", "beating"):
        Gate(paths, name, silence_s=30).report(0, 0)
        paths.beat_file(name).write_bytes(b"1")
    paths.ended_file("ended").write_bytes(b"{}")
    paths.gate_file("left").unlink()
    pause = Pauses(paths).put("trainer", mode=PauseMode.CUT, drain_s=1, max_s=60)
    assert set(watch.waiting(pause)) == {"silent", "beating"}
    now[0] = 29.0
    paths.beat_file("beating").write_bytes(b"2")
    assert set(watch.waiting(pause)) == {"silent", "beating"}
    now[0] = 31.0
    assert set(watch.waiting(pause)) == {"beating"}


def test_pause_that_is_lifted_meanwhile_is_an_error_and_no_success(paths: RunPaths) -> None:
    Gate(paths, "blind", silence_s=60).report(0, 0)
    timer = threading.Timer(0.3, lambda: PolicyRegistry(paths).resume())
    timer.start()
    with pytest.raises(ConfigError, match="lifted or renewed by somebody else"):
        PolicyRegistry(paths).pause(timeout_s=30)
    timer.join()


def test_pauses_of_two_parties_are_lifted_by_their_own_names(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)
    registry.pause(name="trainer")
    registry.pause(name="operator")
    registry.pause(name="trainer", max_s=900)
    assert [(pause.name, pause.max_s) for pause in registry.pauses()] == [
        ("operator", 300),
        ("trainer", 900),
    ]
    registry.resume()
    assert [pause.name for pause in registry.pauses()] == ["operator"]
    registry.pause(name="trainer")
    registry.resume(None)
    assert registry.pauses() == ()


def test_context_lifts_the_pause_also_after_an_error(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)

    def update() -> None:
        with registry.paused() as outcome:
            assert outcome.complete
            assert len(registry.pauses()) == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        update()
    assert registry.pauses() == ()


def test_context_says_where_its_pause_was_over_before_it(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    registry = PolicyRegistry(paths)
    with registry.paused():
        pass
    assert not caplog.records
    with registry.paused():
        Pauses(paths).lift("trainer")  # as a worker does when its time is over
    assert "calls were admitted meanwhile" in caplog.text


@pytest.mark.parametrize(
    "bounds", [{"drain_s": 10, "max_s": 10}, {"drain_s": -1}, {"max_s": 0}, {"mode": "abort"}, {"name": ""}]
)
def test_impossible_pauses_are_refused(paths: RunPaths, bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PolicyRegistry(paths).pause(**bounds)  # type: ignore[arg-type]
    assert PolicyRegistry(paths).pauses() == ()


def test_expired_pause_is_lifted_by_whoever_notices_and_a_renewed_one_is_not(paths: RunPaths) -> None:
    pauses = Pauses(paths)
    serial = put(pauses, "trainer")
    renewed = put(pauses, "trainer")
    assert not Pauses(paths).lift("trainer", serial=serial)
    assert Pauses(paths).lift("trainer", serial=renewed)
    assert not Pauses(paths).lift("trainer", serial=renewed)
    assert pauses.read().pauses == ()


def test_changer_that_died_before_the_name_moved_is_repaired_by_the_next_one(paths: RunPaths) -> None:
    pauses = Pauses(paths)
    put(pauses, "trainer")
    before = paths.admission_now.read_bytes()
    put(pauses, "operator")
    paths.admission_now.write_bytes(before)
    assert [pause.name for pause in Pauses(paths).read().pauses] == ["trainer"]
    assert not Pauses(paths).lift("nobody")
    assert [pause.name for pause in Pauses(paths).read().pauses] == ["trainer", "operator"]


def test_reader_never_goes_back(paths: RunPaths) -> None:
    writer, reader = Pauses(paths), Pauses(paths)
    put(writer, "trainer")
    before = paths.admission_now.read_bytes()
    writer.lift()
    assert reader.read().generation == 2
    paths.admission_now.write_bytes(before)  # a slow writer, or a stale cache
    assert reader.read().generation == 2


def test_name_that_gateways_read_is_there_from_the_first_worker_on_and_stays(paths: RunPaths) -> None:
    Pauses(paths).prepare()
    assert AdmissionState.from_json(paths.admission_now.read_bytes()).generation == 0
    put(Pauses(paths), "trainer")
    Pauses(paths).prepare()
    assert len(Pauses(paths).read().pauses) == 1
    Pauses(paths).lift()
    assert paths.admission_now.exists()


def _toggle(root: str, name: str, rounds: int, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    pauses = Pauses(RunPaths(Path(root)))
    for number in range(rounds):
        serial = put(pauses, name)
        assert pauses.read().find(name) is not None, "nobody else's change undoes ours"
        assert pauses.lift(name, serial=serial if number % 2 else None)


def test_changes_of_many_processes_lose_nothing(paths: RunPaths) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    processes = [
        context.Process(target=_toggle, args=(str(paths.root), f"p{number}", 15, start))
        for number in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    state = Pauses(paths).read()
    assert state.pauses == ()
    assert state.generation == 4 * 15 * 2, "each change has a place of its own"
