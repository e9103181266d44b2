"""Bad input at the real command line: one clear line, exit status 2, and nothing written."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hpcroll.cli.main import run as run_command

Command = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = "{sandbox: {name: bwrap, image: host}, launch: {launcher: local}}"
TASK = {"task_id": "a", "handler": "math", "prompt": "1+1?", "spec": {"answer": "2"}}


def hpcroll(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The real command, as a process of its own."""
    argv = [sys.executable, "-m", "hpcroll.cli", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def inside(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same without the price of a process."""
    argv = [str(argument) for argument in arguments]
    stdout, stderr = io.StringIO(), io.StringIO()
    with chdir(cwd), redirect_stdout(stdout), redirect_stderr(stderr):
        status = run_command(argv)
    return subprocess.CompletedProcess(argv, status, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a good config and a good task file."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    write_tasks(tmp_path, [TASK])
    return tmp_path


def write_tasks(place: Path, tasks: list[dict[str, object]]) -> None:
    (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def submit(place: Path, *arguments: object, through: Command = inside) -> subprocess.CompletedProcess[str]:
    return through("submit", "run", "tasks.jsonl", "--config", "run.yaml", *arguments, cwd=place)


def quietly(place: Path, *arguments: object) -> None:
    result = submit(place, *arguments)
    assert result.returncode == 0, result.stderr


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on standard error that holds `words`, exit status 2, nothing on standard output."""
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("hpcroll: ")
    for word in words:
        assert word in result.stderr


def submissions(place: Path) -> list[str]:
    return [path.name for path in (place / "run" / "tasks").glob("*")] if (place / "run").exists() else []


def test_unknown_key_in_a_config_is_named(place: Path) -> None:
    (place / "run.yaml").write_text("stages: {run: {width: 2, timeout_s: 60, widht: 3}}")
    refused(submit(place, through=hpcroll), "run.yaml", "stages.run.widht", "unknown key")
    assert not (place / "run").exists()


def test_missing_image_is_named_before_anything_is_written(place: Path) -> None:
    (place / "run.yaml").write_text("sandbox: {name: apptainer, image: no/such/image.sif}")
    refused(submit(place, through=hpcroll), "no/such/image.sif", "does not exist")
    assert not (place / "run").exists()


def test_missing_image_of_a_task_is_named_and_nothing_is_submitted(place: Path) -> None:
    write_tasks(place, [TASK, {**TASK, "task_id": "b", "image": "./absent"}])
    refused(submit(place), "absent")
    assert submissions(place) == []


def test_unknown_handler_is_named_with_the_known_ones(place: Path) -> None:
    write_tasks(place, [{**TASK, "handler": "maths"}])
    refused(submit(place, through=hpcroll), "'maths'", "math", "swe")
    assert submissions(place) == []


def test_unknown_plugin_and_option_of_a_config_are_named(place: Path) -> None:
    (place / "run.yaml").write_text("{harness: {name: raect}}")
    refused(submit(place), "'raect'", "react")
    (place / "run.yaml").write_text("{sandbox: {name: bwrap, image: host, options: {colour: red}}}")
    refused(submit(place), "colour", "unknown key")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{not json", "Invalid JSON"),
        ('{"task_id": "b", "handler": "math"}', "prompt"),
        (json.dumps({**TASK, "task_id": "b", "spec": {"anwser": "2"}}), "anwser"),
        (json.dumps(TASK), "line 1"),
    ],
    ids=["json", "field", "spec", "twice"],
)
def test_one_broken_line_of_a_task_file_is_named_and_nothing_is_submitted(
    place: Path, line: str, word: str
) -> None:
    good = [json.dumps({**TASK, "task_id": f"t{number}"}) for number in range(2)]
    (place / "tasks.jsonl").write_text("\n".join([json.dumps(TASK), *good, line, ""]))
    result = submit(place, through=hpcroll if word == "prompt" else inside)
    refused(result, word)
    if word != "anwser":  # a wrong spec is found after reading, by the task's name
        assert "tasks.jsonl line 4" in result.stderr
    else:
        assert "task b" in result.stderr
    assert submissions(place) == []


def test_same_key_with_other_content_is_refused_and_with_the_same_is_one_submission(place: Path) -> None:
    quietly(place, "--key", "epoch0", "--samples", 2)
    again = submit(place, "--key", "epoch0", "--samples", 2, "--json")
    assert json.loads(again.stdout)["created"] is False
    write_tasks(place, [{**TASK, "prompt": "1+2?"}])
    conflict = submit(place, "--key", "epoch0", "--samples", 2, through=hpcroll)
    refused(conflict, "'epoch0'", "other content", "new key")
    assert len(submissions(place)) == 1


def test_without_a_key_the_content_is_the_key(place: Path) -> None:
    quietly(place)
    quietly(place)
    assert len(submissions(place)) == 1
    write_tasks(place, [TASK, {**TASK, "task_id": "b"}])
    quietly(place)
    assert len(submissions(place)) == 2


@pytest.mark.skipif(
    os.geteuid() == 0, reason="missing capability: an unprivileged user (root writes anywhere)"
)
def test_run_directory_without_permission_is_one_line(place: Path) -> None:
    locked = place / "locked"
    locked.mkdir(mode=0o555)
    refused(hpcroll("submit", "locked/run", "tasks.jsonl", "-c", "run.yaml", cwd=place), "locked/run")


def test_unwritable_spool_is_one_line(place: Path) -> None:
    """A file where a directory has to be: not even root can write below it."""
    (place / "file").touch()
    refused(hpcroll("submit", "file/run", "tasks.jsonl", "-c", "run.yaml", cwd=place), "file/run", "cannot")


def test_other_config_of_an_existing_run_is_refused_with_what_differs(place: Path) -> None:
    quietly(place)
    refused(submit(place, "--set", "stages.ready=7"), "another config", "stages")


def test_wrong_arguments_are_bad_usage(place: Path) -> None:
    refused(inside("status", "nowhere", cwd=place), "nowhere", "holds no run")
    refused(inside("submit", "run", "tasks.jsonl", cwd=place), "run")
    refused(inside("launch", cwd=place), "RUN")
    refused(inside("frobnicate", cwd=place), "frobnicate")
    refused(submit(place, "--samples", 0), "samples")


def test_debug_shows_where_an_error_came_from(place: Path) -> None:
    (place / "run.yaml").write_text("nonsense: 1")
    loud = inside("--debug", "submit", "run", "tasks.jsonl", "-c", "run.yaml", cwd=place)
    assert "Traceback" in loud.stderr
    assert loud.returncode == 2
