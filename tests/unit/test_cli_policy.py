"""`hpcroll policy`: publish, list, pause, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.cli.main import run as run_command
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
