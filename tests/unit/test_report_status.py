"""RunStatus and its renderings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from hpcroll.api import Run
from hpcroll.contract import FailureClass, Stage, Status, Task
from hpcroll.report import RunStatus, StatusObserver, log_tails, render_status, rollout_events, status_line
from hpcroll.spool import BeatCounts, EventLog, Heartbeat, Incarnation, Spool, mark_ended
from tests.clock import Clock

LEG = "init+run+eval"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    run = Run.create(
        tmp_path / "run",
        {"sandbox": {"name": "bwrap", "image": "host"}, "lease": {"beat_s": 1, "silence_s": 10}},
    )
    run.submit([Task(task_id="t", handler="math", prompt="?", spec={"answer": "2"})], samples=100, key="k")
    return Spool.open(run.path)


def shown(status: RunStatus) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_status(status))
    return capture.get()


def test_rate_and_time_left_follow_what_was_committed_between_two_looks(spool: Spool) -> None:
    clock = Clock()
    observer = StatusObserver(spool, clock)
    heartbeat = Heartbeat(Incarnation.register(spool, leg=LEG, rank=0))
    heartbeat.beat(BeatCounts(statuses={Status.COMPLETED: 10}))
    observer.observe()
    clock.now_s += 60
    heartbeat.beat(BeatCounts(statuses={Status.COMPLETED: 40}, stages={Stage.RUN: 3}))
    status = observer.observe()
    assert (status.rate_per_min, status.left_s) == (30, 120)
    assert status.stages == {Stage.INIT: 0, Stage.RUN: 3, Stage.EVAL: 0}
    assert "30/min, 2 min 0 s left" in shown(status)
    assert "committed 40/100" in status_line(status)
    assert json.loads(json.dumps(status.to_dict()))["statuses"] == {"completed": 40}


def test_worker_whose_heartbeat_stands_still_is_silent_and_one_with_an_end_has_ended(spool: Spool) -> None:
    clock = Clock()
    observer = StatusObserver(spool, clock)
    alive, still, gone = (Incarnation.register(spool, leg=LEG, rank=rank) for rank in range(3))
    beats = [Heartbeat(incarnation) for incarnation in (alive, still, gone)]
    for beat in beats:
        beat.beat(BeatCounts())
    mark_ended(spool.paths, gone.id)
    observer.observe()
    clock.now_s += 11
    beats[0].beat(BeatCounts())
    status = observer.observe()
    assert (status.workers_alive, status.workers_silent, status.workers_ended) == (1, 1, 1)


def test_each_class_of_failure_is_shown_with_its_latest_example(spool: Spool) -> None:
    incarnation = Incarnation.register(spool, leg=LEG, rank=0)
    Heartbeat(incarnation).beat(BeatCounts(failures={FailureClass.INFRA: 2, FailureClass.POLICY: 1}))
    with EventLog(incarnation) as events:
        for attempt, reason, message in (
            (1, "infra", "old"),
            (1, "policy", "no server"),
            (2, "infra", "new"),
        ):
            fields = {"attempt": attempt, "reason": reason, "stage": "init", "error": "E", "message": message}
            events.write("failed", rollout="s/3", node="n1", **fields)
    with spool.paths.events_file(incarnation.id).open("ab") as file:
        file.write(b'{"event": "failed", "rea')
    status = StatusObserver(spool).observe()
    texts = {item.failure_class: (item.count, item.text) for item in status.failures}
    assert texts == {
        FailureClass.INFRA: (2, "rollout s/3 attempt 2 in init on n1: E: new"),
        FailureClass.POLICY: (1, "rollout s/3 attempt 1 in init on n1: E: no server"),
    }
    assert "no server" in shown(status)


def test_events_of_one_rollout_are_in_order_over_workers(spool: Spool) -> None:
    for rank in range(2):
        with EventLog(Incarnation.register(spool, leg=LEG, rank=rank)) as events:
            events.write("claimed", rollout="s/1", attempt=rank + 1)
            events.write("claimed", rollout="s/2", attempt=1)
    found = rollout_events(spool.paths.root, "s/1")
    assert [event["attempt"] for event in found] == [1, 2]


def test_log_tails_are_the_last_lines_of_every_log(spool: Spool) -> None:
    folder = spool.paths.launches / "20260101T000000-abc"
    folder.mkdir(parents=True)
    (folder / "rank0.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (tail,) = log_tails(spool.paths.root, lines=2)
    assert tail["text"] == "line 98\nline 99"
