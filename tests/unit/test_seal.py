"""Sealing records the ends of the dead, and of nobody else; what stays open is told with its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.api.sealing import seal
from hpcroll.cli.main import run as run_command
from hpcroll.contract import EndReason, Failure, Task
from hpcroll.errors import ConfigError
from hpcroll.launch import Judgement
from hpcroll.launch.deaths import judge_workers, process_gone
from hpcroll.report.unfinished import Waiting
from hpcroll.shards import ShardWriter, open_run, verify_run
from hpcroll.spool import (
    BeatCounts,
    Claims,
    Heartbeat,
    Incarnation,
    Spool,
    WorkerInfo,
    mark_ended,
    sync_done_directories,
)
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.pools import Flight
from hpcroll.worker.scheduler import SlurmJobs

CONFIG = {
    "sandbox": {"name": "bwrap", "image": "host"},
    "launch": {"launcher": "local"},
    "lease": {"beat_s": 0.05, "silence_s": 5},
}
LEG = "init+run+eval"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return submitted(tmp_path / "run")


def submitted(root: Path, **config: object) -> Run:
    run = Run.create(root, {**CONFIG, **config})
    tasks = [Task(task_id=name, handler="math", prompt="1+1?", spec={"answer": "2"}) for name in "abc"]
    run.submit(tasks, samples=2, key="k")
    return run


class Worker:
    """An incarnation of this process, or of one that the test says it is."""

    def __init__(self, run: Run, *, leg: str = LEG, **info: object) -> None:
        self.spool = Spool.open(run.path)
        self.incarnation = Incarnation.register(self.spool, leg=leg, rank=0)
        if info:
            changed = self.incarnation.info.model_copy(update=info)
            self.spool.paths.worker_file(self.incarnation.id).write_text(changed.to_json())
        self.claims = Claims(self.spool, self.incarnation, job_ended=lambda worker: None)
        self.writer = ShardWriter(self.spool.paths, self.incarnation.id, self.spool.config.shards)
        self.assembly = Assembly(self.spool, self.incarnation, harness="react", harness_version="1")

    @property
    def id(self) -> str:
        return self.incarnation.id

    def commit(self, count: int, *, mark: bool = True) -> None:
        for _ in range(count):
            claim = self.claims.next()
            assert claim is not None
            draft = self.assembly.draft(claim, status="completed", stop_reason="submitted")
            claim.note_record()
            address = self.writer.append(self.assembly.finish(draft, Flight(claim), None))
            self.writer.sync()
            assert claim.link_done()
            sync_done_directories([claim])
            if mark:
                self.writer.mark([address])


@pytest.fixture
def workers() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(run: Run, **arguments: object) -> Worker:
        made.append(Worker(run, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for worker in made:
        worker.writer.close()


Make = Callable[..., Worker]


def dead_pid() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_dead_worker_is_ended_and_indexed_and_a_second_look_finds_nothing_to_do(
    run: Run, workers: Make
) -> None:
    worker = workers(run, pid=dead_pid())
    worker.commit(2)
    worker.commit(2, mark=False)
    assert len(list(open_run(run.path, trust_marks=True))) == 4
    report = run.seal()
    assert report.ended == {worker.id: "its process is gone"}
    assert (report.indexed, report.cancelled, report.closed, report.complete) == (2, 0, False, False)
    assert worker.spool.paths.ended_file(worker.id).exists()
    again = run.seal()
    assert (again.ended, again.alive, again.unsure, again.indexed) == ({}, (), {}, 0)
    assert again.unfinished.counts == {Waiting.NOT_STARTED: 2}
    assert verify_run(run.path).unmarked == 0


def test_living_worker_is_left_alone_and_goes_on(run: Run, workers: Make) -> None:
    worker = workers(run)
    worker.commit(2, mark=False)
    for _ in range(3):
        report = run.seal()
        assert (report.ended, report.alive, report.indexed) == ({}, (worker.id,), 0)
    worker.commit(4)
    assert run.seal().complete
    assert not worker.spool.paths.ended_file(worker.id).exists()


def test_reused_pid_does_not_keep_a_dead_worker_alive(run: Run, workers: Make) -> None:
    info = workers(run).incarnation.info
    assert info.started_ticks is not None
    assert process_gone(info) is False
    assert process_gone(info.model_copy(update={"started_ticks": info.started_ticks - 1})) is True
    assert process_gone(info.model_copy(update={"pid": 1})) is not False
    assert process_gone(info.model_copy(update={"started_ticks": None})) is None


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"boot_id": "an earlier boot"}, True),
        ({"boot_id": "another machine's", "host": "n2"}, None),
        ({"boot_id": "another machine's", "host": "localhost"}, None),
        ({"pid_namespace": "pid:[1]"}, None),
    ],
)
def test_only_the_node_itself_knows_its_processes(
    run: Run, workers: Make, change: dict[str, str], gone: bool | None
) -> None:
    assert process_gone(workers(run).incarnation.info.model_copy(update=change)) is gone


def elsewhere(job_id: str | None = None) -> dict[str, object]:
    return {"boot_id": "another machine's", "host": "n2", "job_id": job_id}


def test_worker_of_another_node_is_left_alone_until_somebody_says_that_it_is_dead(
    run: Run, workers: Make
) -> None:
    worker = workers(run, **elsewhere())
    assert worker.claims.next() is not None
    report = run.seal()
    assert report.ended == {}
    assert "ran on n2" in report.unsure[worker.id]
    assert report.unfinished.counts == {Waiting.SILENT: 1, Waiting.NOT_STARTED: 5}
    assert run.seal(gone=[worker.id]).ended == {worker.id: "its end was declared by hand"}
    assert run.seal().unfinished.counts == {Waiting.LEFT: 1, Waiting.NOT_STARTED: 5}


def test_nobody_may_declare_a_living_worker_dead(run: Run, workers: Make) -> None:
    here, there = workers(run), workers(run, **elsewhere())
    beating = threading.Event()
    heartbeat = Heartbeat(there.incarnation)

    def beat() -> None:
        while not beating.wait(0.01):
            heartbeat.beat(BeatCounts())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for worker in (here, there):
            with pytest.raises(ConfigError, match=f"{worker.id} lives"):
                run.seal(gone=[worker.id])
    finally:
        beating.set()
        thread.join()
    with pytest.raises(ConfigError, match="no incarnation of this run is named nobody"):
        run.seal(gone=["nobody"])
    assert not list(here.spool.paths.workers.glob("*.ended"))


class FakeSlurm(SlurmJobs):
    """Slurm, of which job 7 has ended and job 8 runs."""

    def __init__(self) -> None:
        super().__init__(60.0)

    def ask(self, workers: object) -> None:
        pass

    def ended(self, worker: WorkerInfo) -> bool | None:
        return {"7": True, "8": False}.get(worker.job_id or "")


def test_slurms_word_counts_for_a_worker_that_stands_still(run: Run, workers: Make) -> None:
    ended, runs, unknown = (workers(run, **elsewhere(job)) for job in ("7", "8", "9"))
    beats = Heartbeat(ended.incarnation)

    def judge(moves: bool) -> Judgement:
        return judge_workers(
            ended.spool, jobs=FakeSlurm(), sleep=lambda _: beats.beat(BeatCounts()) if moves else None
        )

    assert judge(moves=True).dead == {}
    assert judge(moves=True).alive == {ended.id, runs.id}
    found = judge(moves=False)
    assert found.dead == {ended.id: "Slurm says that job 7 has ended"}
    assert (found.alive, list(found.unsure)) == ({runs.id}, [unknown.id])


def test_slurm_is_asked_once_for_all_workers(
    run: Run, workers: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n'
        "echo '7 COMPLETED 0'; echo '8 RUNNING 0'; echo '9 RUNNING 1'\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    made = {job: workers(run, **elsewhere(job)).id for job in ("7", "8", "9", "10")}
    report = run.seal()
    # 9 runs again under the same number, and Slurm has forgotten 10.
    assert set(report.ended) == {made["7"], made["9"], made["10"]}
    assert report.alive == (made["8"],)
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("--jobs=10,7,8,9")


def test_cancelled_rollouts_of_a_dead_worker_are_committed(run: Run, workers: Make) -> None:
    worker = workers(run, pid=dead_pid())
    assert worker.claims.next() is not None
    assert run.cancel() == 5  # the sixth is the worker's to commit
    report = run.seal()
    assert (report.cancelled, report.complete) == (1, True)
    assert run.seal().cancelled == 0


def test_end_for_all_legs_is_carried_through_where_its_committer_died_between_two_names(
    tmp_path: Path, workers: Make
) -> None:
    run = submitted(tmp_path / "run", legs=[["init", "run"], ["eval"]])
    worker = workers(run, leg="init+run", pid=dead_pid())
    worker.commit(2)
    for path in (run.path / "done" / "eval").rglob("*"):
        if path.is_file():
            path.unlink()
    assert list(open_run(run.path)) == []
    report = run.seal()
    assert report.carried == 2
    assert report.unfinished.counts == {Waiting.NOT_STARTED: 4}
    assert run.seal().carried == 0
    assert len(list(open_run(run.path))) == 2


def test_what_is_open_is_told_with_its_reason(run: Run, workers: Make) -> None:
    living = workers(run)
    claims = [living.claims.next() for _ in range(2)]
    dead = workers(run)
    assert dead.claims.next() is not None
    mark_ended(dead.spool.paths, dead.id)
    assert claims[1] is not None
    claims[1].fail(Failure(attempt=1, reason=EndReason.INFRA))
    found = run.seal().unfinished
    assert found.counts == {
        Waiting.RUNNING: 1,
        Waiting.LEFT: 1,
        Waiting.ENDED: 1,
        Waiting.NOT_STARTED: 3,
    }
    left = next(item for item in found.examples if item.waiting is Waiting.LEFT)
    assert (left.attempt, left.incarnation, left.leg) == (1, dead.id, LEG)
    run.hold("k")
    assert run.seal().unfinished.counts[Waiting.HELD] == 4
    run.resume("k")
    run.close()
    assert run.seal().unfinished.counts[Waiting.CLOSED] == 4


def test_sealers_at_once_agree(run: Run, workers: Make) -> None:
    worker = workers(run, pid=dead_pid())
    worker.commit(4, mark=False)
    assert worker.claims.next() is not None
    run.cancel()
    start = threading.Barrier(4)
    reports = []

    def work() -> None:
        spool = Spool.open(run.path)
        start.wait()
        reports.append(seal(spool))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4
    assert sum(report.cancelled for report in reports) == 1
    report = verify_run(run.path)
    assert (report.problems, report.committed, report.unmarked) == ([], 6, 0)


def test_command_tells_what_it_did_and_closes_only_what_is_complete(
    run: Run, workers: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = workers(run, pid=dead_pid())
    worker.commit(1, mark=False)
    assert run_command(["shards", "seal", str(run.path)]) == 0
    told = capsys.readouterr().out
    assert f"recorded the end of {worker.id}: its process is gone" in told
    assert "5 without a result: nobody has started it" in told
    assert run_command(["shards", "seal", str(run.path), "--close", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["complete"], report["closed"], report["total"]) == (False, False, 6)
    assert report["unfinished"]["waiting"] == {"nobody has started it": 5}
    workers(run).commit(5)
    follower = open_run(run.path).follow(poll_s=0.01)
    assert run_command(["shards", "seal", str(run.path), "--close"]) == 0
    assert "6 of 6 rollouts have their result; the run is closed" in capsys.readouterr().out
    assert len(list(follower)) == 6  # ends, because the run is closed
    assert run_command(["shards", "seal", str(run.path), "--gone", "nobody"]) == 2


def test_this_process_knows_when_it_started() -> None:
    from hpcroll.spool import started_ticks

    assert started_ticks(os.getpid()) is not None
    assert started_ticks(dead_pid()) is None
