"""New weights in the middle of a run: two servers, two workers, a pause, a live addition."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import Call, Status, Task, Trajectory
from hpcroll.launch import JobState
from hpcroll.shards import verify_run
from hpcroll.testing.policy_server import Behaviour, Script, solves
from tests.capabilities import need

WAIT_S = 180.0
ROLLOUTS = 8
TURNS = 4
STALL_S = 1.0
"""Each reply takes this long: a pause always finds calls in flight."""
SPEC = {"verify": ["sh", "-c", "cp answer.txt reward.txt || echo 0 > reward.txt"]}


@pytest.fixture(autouse=True)
def _bwrap() -> None:
    need("bwrap")


def tasks() -> list[Task]:
    return [
        Task(
            task_id=f"t{number}",
            handler="command",
            prompt=f"Write 1 into answer.txt. Number {number:03d}.",
            spec=SPEC,
        )
        for number in range(ROLLOUTS)
    ]


def scripts() -> list[Script]:
    turns = solves(["echo 1 > answer.txt"] * (TURNS - 1), "done").turns
    slow = tuple(turn.model_copy(update={"stall_s": STALL_S}) for turn in turns)
    return [Script(prompt=task.prompt, behaviours=(Behaviour(name="slow", turns=slow),)) for task in tasks()]


class Server:
    """A scripted server as a process, and its log of what it sampled."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log

    def sampled(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def load(self, version: int) -> None:
        data = json.dumps({"version": version}).encode()
        request = urllib.request.Request(f"{self.url}/scripted/version", data=data, method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30):
            pass


@pytest.fixture
def servers(tmp_path: Path, serve_scripts: Callable[..., str]) -> list[Server]:
    logs = [tmp_path / f"sampled-{number}.jsonl" for number in range(2)]
    return [Server(serve_scripts(scripts(), log=log), log) for log in logs]


@pytest.fixture
def run(tmp_path: Path, servers: Sequence[Server]) -> Run:
    config = {
        "model": {"endpoints": [servers[0].url]},
        "sandbox": {"name": "bwrap", "image": "host"},
        "stages": {
            "init": {"width": 4, "timeout_s": 120},
            "run": {"width": 4, "timeout_s": 120},
        },
        "lease": {"beat_s": 0.5, "silence_s": 60},
        "launch": {"launcher": "local", "idle_s": 0},
    }
    return Run.create(tmp_path / "run", config=config)


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


def count(servers: Sequence[Server]) -> int:
    return sum(len(server.sampled()) for server in servers)


def test_weights_change_in_a_pause_and_no_reply_mixes_two_versions(run: Run, servers: list[Server]) -> None:
    run.policy.publish(0, weights="ckpt/0")
    lease = run.policy.register_endpoint(servers[1].url, "policy")
    run.submit(tasks(), samples=1, key="k")
    workers = run.launch(workers=2)
    wait_until(lambda: all(len(server.sampled()) >= 2 for server in servers), "no calls on both servers")

    # Calls in flight have a second to go and get a fifth of it: they are cut.
    with run.policy.paused(drain_s=0.2, timeout_s=60) as outcome:
        assert outcome.complete, outcome.waiting
        at_rest = count(servers)
        for server in servers:
            server.load(1)
        run.policy.publish(1, weights="ckpt/1")
        lease.beat()
        time.sleep(3 * STALL_S)
        assert count(servers) == at_rest, "something was sampled in the pause"
        results = list(run.results("k", wait=False))
        assert len(results) < ROLLOUTS, "the pause came too late to be in the middle"

    def finished() -> bool:
        lease.beat()
        return sum(1 for _ in run.results("k", wait=False)) == ROLLOUTS

    wait_until(finished, "not every rollout ended")
    live = (JobState.PENDING, JobState.RUNNING)
    wait_until(lambda: not any(state in live for state in run.job_states(workers)), "the workers stay")
    assert not list((run.path / "policy" / "gates").iterdir()), "gates are withdrawn"
    trajectories = [result.trajectory() for result in run.results("k", wait=False)]
    report = verify_run(run.path)
    assert report.ok, report
    assert [t.record.status for t in trajectories] == [Status.COMPLETED] * ROLLOUTS
    assert {t.record.reward for t in trajectories} == {1.0}
    assert {t.record.attempts for t in trajectories} == {()}, "no attempt failed"
    assert_calls(trajectories, servers)


def assert_calls(trajectories: list[Trajectory], servers: list[Server]) -> None:
    calls: list[Call] = [call for t in trajectories for call in t.record.calls]
    good = [call for call in calls if call.error is None]
    cut = [call for call in calls if call.error is not None]
    assert len(good) == ROLLOUTS * TURNS, "each turn was answered once"
    assert cut, "the pause found calls in flight"
    assert all("cut by a pause" in str(call.error) for call in cut)
    versions = Counter(
        (call.policy.version_low, call.policy.version_high) for call in good if call.policy is not None
    )
    assert set(versions) == {(0, 0), (1, 1)}, versions
    both = [
        t
        for t in trajectories
        if len({c.policy.version_low for c in t.record.calls if c.policy and c.error is None}) == 2
    ]
    assert both, "rollouts span the update, and say where"
    assert {call.endpoint for call in good} == {server.url for server in servers}

    served = {
        (entry["session"], tuple(entry["sampled_ids"]), entry["version"])
        for server in servers
        for entry in server.sampled()
    }
    for t in trajectories:
        by_index = {call.call_index: call for call in t.record.calls}
        session = f"{t.record.rollout_id}.{t.record.attempt}"
        for span in t.record.call_spans:
            call = by_index[span.call_index]
            ids = t.tokens[span.segment_index].ids[span.start : span.start + span.length]
            assert call.policy is not None
            if call.error is None:
                assert (session, tuple(ids.tolist()), call.policy.version_low) in served
