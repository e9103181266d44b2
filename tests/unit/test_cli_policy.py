"""`hpcroll policy`: publish, list, pause, resume, window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.cli.main import run as run_command
from hpcroll.contract import Task
from hpcroll.fs import RunPaths
from hpcroll.policy import Gate


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = {"sandbox": {"name": "bwrap", "image": "host"}, "model": {"name": "qwen"}}
    return Run.create(tmp_path / "run", config)


def command(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def test_versions_are_published_for_the_runs_policy_and_listed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("policy", "publish", run.path, 0, "--weights", "ckpt/0", "--digest", "d0") == 0
    assert capsys.readouterr().out == "published: qwen/main@0\n"
    assert command("policy", "publish", run.path, 3, "--name", "lora", "--lineage", "b") == 0
    assert command("policy", "publish", run.path, 0, "--weights", "ckpt/0", "--digest", "other") == 2
    capsys.readouterr()
    assert command("policy", "list", run.path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["lineage"], row["version"], row["digest"]) for row in rows] == [
        ("qwen", "main", 0, "d0"),
        ("lora", "b", 3, None),
    ]
    latest = run.policy.latest()
    assert latest is not None
    assert latest.weights == "ckpt/0"


def test_pause_is_seen_by_list_and_taken_back_by_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.policy.pause()
    assert command("policy", "pause", run.path, "--max-s", 900) == 0
    assert "no live worker has a call under way" in capsys.readouterr().out
    assert command("policy", "list", run.path) == 0
    assert "paused by operator" in capsys.readouterr().err
    assert command("policy", "resume", run.path) == 0
    assert capsys.readouterr().out == "resumed; still paused by trainer\n"
    assert command("policy", "resume", run.path, "--all") == 0
    assert command("policy", "resume", run.path, "--all") == 0
    assert capsys.readouterr().out == "resumed\nnothing to resume\n"


def test_pause_that_a_worker_does_not_see_in_time_is_status_1_and_names_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Gate(RunPaths(run.path), "n1-r0-l0-aa", silence_s=60).report(0, 0)
    assert command("policy", "pause", run.path, "--timeout-s", 0.1, "--json") == 1
    assert json.loads(capsys.readouterr().out) == [
        {"worker": "n1-r0-l0-aa", "missing": "has not seen the pause yet"}
    ]


def test_pause_of_impossible_bounds_is_bad_usage(run: Run) -> None:
    assert command("policy", "pause", run.path, "--mode", "abort") == 2
    assert command("policy", "pause", run.path, "--drain-s", 30, "--max-s", 20) == 2
    assert run.policy.pauses() == ()


def test_status_says_whose_pause_a_run_waits_for(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.policy.pause()
    assert command("status", run.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["paused_by"] == ["trainer"]
    assert command("status", run.path) == 0
    assert "none published, paused by trainer" in capsys.readouterr().out


def test_list_shows_lag_and_lineages(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for version in range(4):
        assert command("policy", "publish", run.path, version, "--weights", f"ckpt/{version}") == 0
    branch = ("--lineage", "main-2", "--parent", "main@1", "--weights", "b")
    assert command("policy", "publish", run.path, 2, *branch) == 0
    capsys.readouterr()
    assert command("policy", "list", run.path, "--json") == 0
    said = capsys.readouterr()
    assert [(row["lineage"], row["version"], row["lag"]) for row in json.loads(said.out)] == [
        ("main", 0, 2),
        ("main", 1, 1),
        ("main", 2, None),
        ("main", 3, None),
        ("main-2", 2, 0),
    ]
    assert "lineage qwen/main: versions 0 to 3; 1 behind from version 1 on" in said.err
    assert "lineage qwen/main-2: versions 2 to 2, from main@1; newest" in said.err


@pytest.mark.parametrize("parent", ["main", "@1", "main@x"])
def test_parent_that_names_no_version_is_bad_usage(run: Run, parent: str) -> None:
    assert command("policy", "publish", run.path, 0, "--lineage", "b", "--parent", parent) == 2


def test_window_is_set_said_and_taken_away(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("policy", "window", run.path) == 0
    assert capsys.readouterr().out == "no window; 0 groups settled\n"
    bounds = ("--groups", 8, "--versions", 1, "--groups-per-version", 3)
    assert command("policy", "window", run.path, *bounds) == 0
    assert "groups below 6 may be started (8 by groups, 6 by versions)" in capsys.readouterr().out
    assert run.policy.publish(0, weights="w") == run.policy.latest()
    run.policy.publish(1, weights="w")
    assert command("policy", "window", run.path, "--settle", 4, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["limit"], said["settled"], said["limits"]) == (9, 4, {"groups": 12, "versions": 9})
    assert command("policy", "list", run.path) == 0
    assert "groups below 9 may be started" in capsys.readouterr().err
    assert command("policy", "window", run.path, "--off") == 0
    assert run.policy.allowance().limit is None


def test_window_that_bounds_nothing_is_bad_usage(run: Run) -> None:
    assert command("policy", "window", run.path, "--versions", 1) == 2
    assert command("policy", "window", run.path, "--off", "--groups", 1) == 2
    assert run.policy.allowance().bounds is None


def test_status_shows_the_window_and_what_waits_behind_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("status", run.path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["window"] is None
    tasks = [
        Task(task_id=f"t{n}", handler="command", prompt="p", spec={"verify": ["true"]}) for n in range(5)
    ]
    run.submit(tasks, samples=2, key="k")
    run.policy.window(groups=2)
    run.policy.settle(1)
    assert command("status", run.path, "--json") == 0
    window = json.loads(capsys.readouterr().out)["window"]
    assert window == {"limit": 3, "settled": 1, "waiting_groups": 2}
    assert command("status", run.path) == 0
    assert "groups below 3 may start, 1 are settled; 2 wait behind it" in capsys.readouterr().out
