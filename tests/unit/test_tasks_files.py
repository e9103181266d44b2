"""Task files: read whole or not at all, and resolved before anything is submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcroll.config import RunConfig
from hpcroll.contract import Task
from hpcroll.errors import ConfigError, PluginError
from hpcroll.tasks import read_tasks, resolve_tasks, write_tasks
from hpcroll.testing.demo import demo_tasks


def line(task_id: str, **fields: object) -> str:
    spec = {"answer": "1"}
    return json.dumps({"task_id": task_id, "handler": "math", "prompt": "p", "spec": spec, **fields})


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_blank_lines_are_skipped_and_order_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path, line("b"), "", "   ", line("a"), "")
    assert [task.task_id for task in read_tasks(path)] == ["b", "a"]


def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    text = line("a", prompt="one\u2028two").replace("\\u2028", "\u2028")
    assert read_tasks(written(tmp_path, text))[0].prompt == "one\u2028two"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("{", "JSON"),
        ("[]", "should be an object"),
        (line("b", handler=""), "handler"),
        (line("b", answer=1), "unknown fields answer"),
        (line("b", schema_version="2.0"), "schema version 2.0"),
        (json.dumps({"handler": "math", "prompt": "p"}), "task_id"),
    ],
    ids=["half a line", "no object", "empty handler", "unknown field", "newer schema", "no task_id"],
)
def test_broken_line_is_named_with_file_and_number(broken: str, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, line("a"), "", broken, line("c"))
    with pytest.raises(ConfigError, match=reason) as caught:
        read_tasks(path)
    assert f"{path} line 3" in str(caught.value)


def test_task_id_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 3: task_id 'a' stands in line 1 already"):
        read_tasks(written(tmp_path, line("a"), line("b"), line("a")))


def test_file_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        read_tasks(written(tmp_path, "", ""))


def test_file_that_cannot_be_read_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        read_tasks(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_tasks(tmp_path / "latin.jsonl")


def test_written_tasks_are_read_back_and_never_replace_others(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    tasks = demo_tasks()
    write_tasks(tasks, path)
    assert read_tasks(path) == tasks
    with pytest.raises(ConfigError, match="exists already"):
        write_tasks(tasks[:1], path)


def test_demo_tasks_resolve_and_have_ids_of_their_own() -> None:
    tasks = demo_tasks()
    assert len({task.task_id for task in tasks}) == len(tasks) >= 24
    assert len({task.prompt for task in tasks}) == len(tasks)
    assert [task.task_id for task in resolve_tasks(tasks, Path("/"), RunConfig())] == [
        task.task_id for task in tasks
    ]


def test_unknown_handler_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    task = Task(task_id="a", handler="swee", prompt="p")
    with pytest.raises(PluginError, match="swe"):
        resolve_tasks([task], tmp_path, RunConfig())


def test_wrong_spec_is_refused_with_task_and_field(tmp_path: Path) -> None:
    task = Task(task_id="sum-7", handler="math", prompt="p", spec={"answr": "1"})
    with pytest.raises(ConfigError, match="answr") as caught:
        resolve_tasks([task], tmp_path, RunConfig())
    assert "sum-7" in str(caught.value)


def swe(tmp_path: Path, **spec: object) -> Task:
    for name in ("repo.tar", "tests.tar"):
        (tmp_path / name).write_bytes(name.encode())
    fields = {
        "repo": "repo.tar",
        "tests": "tests.tar",
        "tests_paths": ["tests"],
        "test_command": "true",
        "fail_to_pass": ["a"],
        **spec,
    }
    return Task.model_validate({"task_id": "s", "handler": "swe", "prompt": "p", "spec": fields})


def test_paths_become_absolute_and_contents_get_digests(tmp_path: Path) -> None:
    (resolved,) = resolve_tasks([swe(tmp_path)], tmp_path, RunConfig())
    assert resolved.spec["repo"] == str(tmp_path / "repo.tar")
    digests = resolved.spec["content_sha256"]
    assert isinstance(digests, dict)
    assert set(digests) == {"repo", "tests"}
    (tmp_path / "repo.tar").write_bytes(b"other")
    with pytest.raises(ConfigError, match="repo has changed"):
        resolve_tasks([resolved], tmp_path, RunConfig())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"repo": "absent.tar"}, "repo: .*absent.tar is not a file"),
        ({"repo": {"../x": ""}}, "repo: .*inside the tree"),
        ({"tests_paths": ["/etc"]}, "tests_paths"),
        ({"evaluator": "nose"}, "nose"),
        ({"fail_to_pass": []}, "fail_to_pass"),
    ],
)
def test_spec_of_a_repository_is_refused_where_it_cannot_work(
    spec: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, PluginError), match=reason):
        resolve_tasks([swe(tmp_path, **spec)], tmp_path, RunConfig())
