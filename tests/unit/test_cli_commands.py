"""Commands on a run without workers: what they print, and how fast the program starts."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcroll
from hpcroll.api import Run
from hpcroll.cli.main import run as run_command
from hpcroll.contract import Task


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(
        tmp_path / "run", {"sandbox": {"name": "bwrap", "image": "host"}, "launch": {"launcher": "local"}}
    )
    tasks = [Task(task_id=name, handler="math", prompt="1+1?", spec={"answer": "2"}) for name in "ab"]
    made.submit(tasks, samples=3, key="k")
    return made


def command(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"hpcroll {hpcroll.__version__}\n"


def test_program_starts_within_half_a_second_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, hpcroll.cli.main;"
        "heavy = {'numpy', 'pydantic', 'submitit', 'aiohttp', 'rich.console'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "hpcroll.cli", "--version"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: what else the machine does must not decide.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5


def test_status_as_json_tells_what_is_submitted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("status", run.path, "--json", "--exact") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["total"], status["committed"], status["done"]) == (6, 0, False)
    assert status["submissions"] == [{"key": "k", "rollouts": 6}]
    assert status["exact"]["done"] == {"init+run+eval": 0}


def test_cancel_commits_what_nobody_runs_and_readers_see_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("cancel", run.path, "--key", "k") == 0
    assert "6 rollouts committed as cancelled" in capsys.readouterr().out
    results = list(run.results("k"))
    assert [result.status for result in results] == ["cancelled"] * 6
    assert command("shards", "verify", run.path) == 0
    assert command("status", run.path, "--json") == 0
    status = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert (status["statuses"], status["done"]) == ({"cancelled": 6}, True)


def test_show_prints_a_trajectory_and_names_one_that_is_not_there(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = run.submission("k").name
    run.cancel(rollout=f"{segment}/0")
    assert command("show", run.path, f"{segment}/0") == 0
    assert re.search(r"ended +cancelled", capsys.readouterr().out)
    assert command("show", run.path, f"{segment}/1") == 2
    assert "no committed result yet" in capsys.readouterr().err
    assert command("show", run.path, f"{segment}/99") == 2
    assert command("show", run.path, "nonsense") == 2


def test_rows_are_counted_over_a_run_and_for_each_rollout(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.cancel()
    capsys.readouterr()
    assert command("shards", "stats", run.path, "--rollouts", "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["total"]["rollouts"] == len(listing["rollouts"]) == 6
    assert listing["total"]["merged_rows"] == 0
    assert command("shards", "stats", run.path) == 0
    assert re.search(r"call rows +0", capsys.readouterr().out)


def test_shards_are_listed_and_printed_as_json_lines(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.cancel()
    capsys.readouterr()
    assert command("shards", "ls", run.path, "--json") == 0
    assert sum(row["committed"] for row in json.loads(capsys.readouterr().out)) == 6
    assert command("shards", "cat", run.path, "-n", 4) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines] == ["cancelled"] * 4
    assert command("shards", "cat", run.path, "--status", "completed") == 0
    assert capsys.readouterr().out == ""
    assert command("shards", "cat", run.path, "--status", "finished") == 2


def test_cancel_needs_to_know_what(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("cancel", run.path) == 2
    assert command("cancel", run.path, "--key", "other") == 2
    assert "known: k" in capsys.readouterr().err
    assert command("retry", run.path) == 2


def test_dry_run_shows_the_script_and_starts_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("launch", run.path, "-n", 3, "--dry-run") == 0
    assert f"hpcroll.worker {run.path} --leg init+run+eval" in capsys.readouterr().out
    assert list((run.path / "logs").iterdir()) == []


def test_closed_run_takes_nothing_more(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("close", run.path) == 0
    assert command("launch", run.path) == 2
    assert "closed" in capsys.readouterr().err
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"task_id": "c", "handler": "math", "prompt": "?", "spec": {"answer": "1"}}\n')
    assert command("submit", run.path, tasks) == 1


def test_tasks_are_made_from_rows_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
    rows.write_text(
        '{"question": "1+1?", "answer": "two #### 2"}\n{"question": "2+2?", "answer": "#### 4"}\n'
    )
    assert command("tasks", "from-rows", rows, "--format", "gsm8k", "--out", tasks, "--limit", 1) == 0
    assert command("tasks", "check", tasks, "--json") == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2]) == [{"handler": "math", "tasks": 1}]
    assert command("tasks", "from-rows", rows, "--format", "gsm9k", "--out", tasks) == 2
    assert "gsm8k, humaneval, scibench" in capsys.readouterr().err


def test_images_are_listed_with_their_problems_and_bad_sources_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True)
    for name in ("sh", "cat"):
        (tmp_path / "root" / "bin" / name).touch()
    (tmp_path / "cut.sif").write_bytes(b"#!/usr/bin/env run-singularity")
    assert command("images", "ls", tmp_path, "--json") == 0
    rows = {Path(row["image"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["root"]["kind"], rows["root"]["problem"]) == ("directory", "")
    assert "not a SIF file" in rows["cut.sif"]["problem"]
    assert command("images", "ls", tmp_path / "absent") == 2
    assert command("images", "pull", "debian:12", tmp_path / "new.sif") == 2
    assert command("images", "build", tmp_path / "no.def", tmp_path / "new.sif") == 2
    assert "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "new.sif").exists()


def test_launch_with_an_image_that_is_gone_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    for name in ("sh", "cat"):
        (root / "bin" / name).touch(mode=0o755)
    run = Run.create(
        tmp_path / "run", {"sandbox": {"name": "bwrap", "image": "host"}, "launch": {"launcher": "local"}}
    )
    task = Task(task_id="a", handler="math", prompt="?", image=str(root), spec={"answer": "2"})
    run.submit([task], key="k")
    shutil.rmtree(root)
    assert command("launch", run.path) == 2
    assert str(root) in capsys.readouterr().err
    assert list((run.path / "logs").iterdir()) == []
