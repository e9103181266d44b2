"""How rollouts end: by the agent, a limit, a failure, a cancellation or a drain, in real sandboxes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.cli.main import run as command
from hpcroll.contract import FailureClass, Status, StopReason, Task, Trajectory
from hpcroll.fs import RunPaths
from hpcroll.gateway import read_journal
from hpcroll.shards import verify_run
from hpcroll.spool import read_events, read_worker
from hpcroll.testing.policy_server import Behaviour, Script, garbage, loops, solves
from hpcroll.trajectory import check
from tests.capabilities import need

WAIT_S = 180.0
PROMPT = "Write 1 into answer.txt."
TASK = Task(
    task_id="write",
    handler="command",
    prompt=PROMPT,
    spec={"verify": ["sh", "-c", "cp answer.txt reward.txt || echo 0 > reward.txt"]},
)
WRITES = "echo 1 > answer.txt"


@pytest.fixture(autouse=True)
def _bwrap() -> None:
    need("bwrap")


class LocalRun:
    """A run of this machine: local launcher, bwrap sandboxes, one scripted behaviour."""

    def __init__(
        self, root: Path, url: str, *, tasks: Sequence[Task] = (TASK,), samples: int = 1, **config: Any
    ) -> None:
        defaults: dict[str, Any] = {
            "model": {"endpoints": [url]},
            "sandbox": {"name": "bwrap", "image": "host"},
            "lease": {"beat_s": 0.5, "silence_s": 60},
            "launch": {"launcher": "local", "idle_s": 0},
        }
        self.run = Run.create(root, config={**defaults, **config})
        self.paths = RunPaths(self.run.path)
        self.submission = self.run.submit(tasks, samples=samples, key="endings")

    def finish(self) -> list[Trajectory]:
        """Launches a worker, waits for its end, checks every record; the trajectories."""
        self.run.launch(workers=1, wait=True)
        report = verify_run(self.run.path)
        assert report.ok, report
        return [result.trajectory() for result in self.run.results("endings", wait=False)]

    def wait_for_event(self, name: str) -> None:
        self.wait_until(
            lambda: any(event.event == name for event in read_events(self.paths)), f"no event {name}"
        )

    def wait_for_calls(self) -> list[str]:
        """Waits until a worker has journalled a model call; the incarnations that have."""

        def writers() -> list[str]:
            return [path.name for path in self.paths.journal.iterdir() if list(read_journal(path))]

        self.wait_until(lambda: bool(writers()), "no call was journalled")
        return writers()

    def wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, complaint
            time.sleep(0.05)


@pytest.fixture
def local_run(tmp_path: Path, serve_scripts: Callable[..., str]) -> Callable[..., LocalRun]:
    def start(behaviour: Behaviour, **settings: Any) -> LocalRun:
        url = serve_scripts([Script(prompt=PROMPT, behaviours=(behaviour,))])
        return LocalRun(tmp_path / "run", url, **settings)

    return start


def test_a_solved_rollout_is_completed_and_trainable(local_run: Callable[..., LocalRun]) -> None:
    [trajectory] = local_run(solves([WRITES], "done")).finish()
    record = trajectory.record
    assert (record.status, record.stop_reason, record.reward) == (Status.COMPLETED, StopReason.SUBMITTED, 1.0)
    assert record.trainable
    assert len(record.calls) == 2
    assert len(record.actions) == 2
    assert trajectory.action_tokens > 0


def run_stage(timeout_s: float) -> dict[str, Any]:
    return {"run": {"width": 2, "timeout_s": timeout_s}}


def half_done(stall_s: float) -> Behaviour:
    """Does the work, then never says that it is done."""
    first, last = solves([WRITES], "done").turns
    return Behaviour(name="half", turns=(first, last.model_copy(update={"stall_s": stall_s})))


@pytest.mark.parametrize(("rule", "reward", "trainable"), [("grade", 1.0, True), ("mask", 1.0, False)])
def test_a_timed_out_agent_keeps_its_work_and_is_graded(
    local_run: Callable[..., LocalRun], rule: str, reward: float, trainable: bool
) -> None:
    stages = {**run_stage(6.0), "on_timeout": rule}
    [trajectory] = local_run(half_done(600), stages=stages).finish()
    record = trajectory.record
    assert (record.status, record.stop_reason) == (Status.TRUNCATED, StopReason.TIME_LIMIT)
    assert (record.reward, record.trainable) == (reward, trainable)
    assert record.calls[0].error is None
    assert trajectory.action_tokens > 0
    assert record.timing.run is not None
    assert record.timing.run.duration_s < 60


def test_a_timed_out_agent_is_not_graded_where_the_config_drops_it(
    local_run: Callable[..., LocalRun],
) -> None:
    stages = {**run_stage(6.0), "on_timeout": "drop"}
    [trajectory] = local_run(half_done(600), stages=stages).finish()
    assert trajectory.record.reward is None
    assert not trajectory.record.reward_valid
    assert trajectory.action_tokens > 0


@pytest.mark.parametrize("behaviour", [loops(), garbage()], ids=["loops", "garbage"])
def test_an_agent_that_never_ends_meets_its_turn_limit(
    local_run: Callable[..., LocalRun], behaviour: Behaviour
) -> None:
    [trajectory] = local_run(behaviour, harness={"max_turns": 4}).finish()
    record = trajectory.record
    assert (record.status, record.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LIMIT)
    assert len(record.calls) == 4
    assert record.reward == 0.0


def test_a_rollout_that_sampled_its_fill_meets_its_token_limit(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    url = serve_scripts([Script(prompt=PROMPT, behaviours=(loops(),))])
    run = LocalRun(tmp_path / "run", url, model={"endpoints": [url], "rollout_tokens": 40})
    [trajectory] = run.finish()
    assert trajectory.record.stop_reason is StopReason.TOKEN_LIMIT
    assert trajectory.record.status is Status.TRUNCATED


def test_a_slow_verifier_gives_no_reward_and_no_retry(local_run: Callable[..., LocalRun]) -> None:
    slow = TASK.model_copy(update={"spec": {"verify": ["sleep", "600"], "verify_timeout_s": 600}})
    stages = {"eval": {"width": 1, "timeout_s": 4}}
    [trajectory] = local_run(solves([WRITES], "done"), tasks=[slow], stages=stages).finish()
    record = trajectory.record
    assert (record.status, record.reward, record.attempt) == (Status.COMPLETED, None, 1)
    assert record.verdict is not None
    assert "longer than 4 s" in str(record.verdict.no_reward_because)
    assert not record.trainable


def test_no_inference_server_ends_as_a_policy_failure(tmp_path: Path) -> None:
    dead = "http://127.0.0.1:9"
    model = {"endpoints": [dead], "call_tries": 1}
    [trajectory] = LocalRun(tmp_path / "run", dead, model=model, attempts={"policy": 2}).finish()
    record = trajectory.record
    assert (record.status, record.stop_reason) == (Status.FAILED, StopReason.ERROR)
    assert record.failure is not None
    assert record.failure.failure_class is FailureClass.POLICY
    assert [failure.attempt for failure in record.attempts] == [1, 2]
    assert record.reward is None


def test_a_broken_task_fails_alone(local_run: Callable[..., LocalRun]) -> None:
    broken = TASK.model_copy(
        update={"task_id": "broken", "spec": {**TASK.spec, "setup": ["sh", "-c", "echo no luck >&2; exit 3"]}}
    )
    trajectories = local_run(solves([WRITES], "done"), tasks=[broken, TASK]).finish()
    by_task = {trajectory.record.task_id: trajectory.record for trajectory in trajectories}
    assert by_task["write"].reward == 1.0
    assert by_task["broken"].status is Status.FAILED
    assert by_task["broken"].failure is not None
    assert "no luck" in by_task["broken"].failure.message


def test_a_cancelled_rollout_keeps_its_partial_trajectory(local_run: Callable[..., LocalRun]) -> None:
    case = local_run(half_done(600))
    case.run.launch(workers=1)
    case.wait_for_event("run.start")
    case.wait_for_calls()
    case.run.cancel()
    [result] = case.run.results("endings")
    trajectory = result.trajectory()
    assert trajectory.record.status is Status.CANCELLED
    assert trajectory.record.reward is None
    assert trajectory.action_tokens > 0
    assert not trajectory.record.trainable


@pytest.mark.parametrize("damaged", [False, True])
def test_rollout_cancelled_before_its_evaluation_leg_keeps_what_its_agent_did(
    local_run: Callable[..., LocalRun], damaged: bool
) -> None:
    case = local_run(solves([WRITES], "done"), legs=[["init", "run"], ["eval"]])
    case.run.launch(workers=1, leg="init+run", wait=True)
    if damaged:
        [bundle] = [path for path in case.paths.bundles.rglob("*") if path.is_file()]
        bundle.write_bytes(bundle.read_bytes()[:-1])
    case.run.cancel()
    [result] = case.run.results("endings", wait=False)
    trajectory = result.trajectory()
    assert (trajectory.record.status, trajectory.record.reward) == (Status.CANCELLED, None)
    assert not trajectory.record.trainable
    assert (len(trajectory.record.calls), trajectory.action_tokens > 0) == (
        (0, False) if damaged else (2, True)
    )
    assert any("cannot be read" in gap for gap in trajectory.record.gaps) is damaged
    assert verify_run(case.run.path).ok


def test_a_killed_worker_leaves_a_partial_trajectory_that_show_finds(
    local_run: Callable[..., LocalRun], capsys: pytest.CaptureFixture[str]
) -> None:
    case = local_run(half_done(600))
    case.run.launch(workers=1)
    [ref] = case.submission.refs
    [worker] = case.wait_for_calls()
    worker_pid = read_worker(case.paths.worker_file(worker)).pid
    os.kill(worker_pid, signal.SIGKILL)
    case.run.drain()  # or the next incarnation would start the rollout again
    case.wait_until(lambda: case.paths.ended_file(worker).exists(), "the end of the worker was not noted")
    partial = case.run.partial_trajectory(ref.rollout_id, attempt=1)
    assert "kill" in str(partial.record.partial)
    assert partial.action_tokens > 0
    assert check(partial) == ()
    assert command(["show", str(case.run.path), ref.rollout_id]) == 0
    assert "PARTIAL: attempt 1" in capsys.readouterr().out


def test_a_drain_writes_nothing_terminal_and_the_next_launch_goes_on(
    local_run: Callable[..., LocalRun],
) -> None:
    case = local_run(solves([f"sleep 3; {WRITES}"], "done"), samples=3)
    handles = case.run.launch(workers=1)
    case.wait_for_event("run.start")
    case.run.drain()
    deadline = time.monotonic() + WAIT_S
    while any(state.value in ("running", "pending") for state in case.run.job_states(handles)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert list(case.run.results("endings", wait=False)) == []
    trajectories = case.finish()
    assert [trajectory.record.reward for trajectory in trajectories] == [1.0] * 3
    assert {failure.reason.value for each in trajectories for failure in each.record.attempts} == {"released"}


def test_shards_hold_what_the_server_sampled_id_for_id(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    tasks = [
        TASK.model_copy(update={"task_id": f"write-{n}", "prompt": f"{PROMPT} Number {n:03d}."})
        for n in range(4)
    ]
    scripts = [
        Script(prompt=task.prompt, behaviours=(solves([WRITES, "cat answer.txt"], "done"),)) for task in tasks
    ]
    log = tmp_path / "sampled.jsonl"
    url = serve_scripts(scripts, log=log)
    trajectories = LocalRun(tmp_path / "run", url, tasks=tasks, samples=2).finish()
    sampled = sorted(tuple(json.loads(line)["sampled_ids"]) for line in log.read_text().splitlines())
    stored = sorted(
        tuple(arrays.ids[start : start + length].tolist())
        for trajectory in trajectories
        for arrays, start, length in spans(trajectory)
    )
    assert len(sampled) == 8 * 3
    assert stored == sampled


def spans(trajectory: Trajectory) -> list[tuple[Any, int, int]]:
    return [
        (trajectory.tokens[span.segment_index], span.start, span.length)
        for span in trajectory.record.call_spans
    ]
