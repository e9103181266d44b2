"""Task files: one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from hpcroll.config import RunConfig
from hpcroll.config.load import describe
from hpcroll.contract import Task
from hpcroll.errors import ConfigError, SchemaVersionError
from hpcroll.fs import publish
from hpcroll.handlers.base import Handler
from hpcroll.plugins.registry import Family, load


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a JSONL file, all of them or none; blank lines are skipped.

    Raises `ConfigError` that names the file and the line of the first broken one, or both lines of a
    `task_id` that stands twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"task file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"task file {path} is not UTF-8 text: {error}") from error
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    # Only newlines end a line: JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        task = _read_line(line, f"{path} line {number}")
        first = seen.setdefault(task.task_id, number)
        if first != number:
            raise ConfigError(
                f"{path} line {number}: task_id {task.task_id!r} stands in line {first} already"
            )
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"task file {path} has no tasks")
    return tasks


def write_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Writes `tasks` as `read_tasks` reads them; raises `ConfigError` where `path` holds something else."""
    lines = (task.model_dump_json(exclude_defaults=True) + "\n" for task in tasks)
    if not publish(path, "".join(lines).encode()):
        raise ConfigError(f"{path} exists already; choose another name or remove it")


def resolve_tasks(tasks: Sequence[Task], base: Path, config: RunConfig) -> list[Task]:
    """The tasks as submitted: handlers known, specs valid, paths absolute (relative to `base`) and present.

    Raises `ConfigError`, or `PluginError` for an unknown handler, before anything is written.
    """

    @cache
    def handler(name: str) -> Handler:
        made: Handler = load(Family.HANDLER, name)(config.evaluation)
        return made

    return [handler(task.handler).resolve(task, base) for task in tasks]


def _read_line(line: str, where: str) -> Task:
    try:
        return Task.from_json(line)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error)}") from error
    except SchemaVersionError as error:
        raise ConfigError(f"{where}: {error}") from error
