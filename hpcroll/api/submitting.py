"""From what a user gives to resolved configs and tasks; nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcroll.api.validation import anchor_image, anchor_paths, check_config, check_images
from hpcroll.config import RunConfig, load_config
from hpcroll.config.load import describe
from hpcroll.contract import Task, sha256_hex
from hpcroll.errors import ConfigError
from hpcroll.tasks import read_tasks, resolve_tasks


def read_config(
    config: Path | str | RunConfig | dict[str, Any] | None, overrides: Iterable[str] = ()
) -> RunConfig:
    """The config, its relative paths anchored at the YAML file or the working directory."""
    if isinstance(config, Path | str):
        path = Path(config)
        return anchor_paths(load_config(path, overrides), path.absolute().parent)
    if tuple(overrides):
        raise ConfigError("overrides apply to a config file only")
    if isinstance(config, RunConfig):
        return anchor_paths(config, Path.cwd())
    try:
        return anchor_paths(RunConfig.model_validate(config or {}), Path.cwd())
    except ValidationError as error:
        raise ConfigError(f"config: {describe(error)}") from error


def read_and_check(tasks: Path | str | Sequence[Task], config: RunConfig) -> list[Task]:
    """The tasks as they are submitted: handlers known, specs valid, paths absolute and present.

    Raises `ConfigError`, which names the line of a task file or the task, or `PluginError`.
    """
    if isinstance(tasks, Path | str):
        base, unresolved = Path(tasks).absolute().parent, read_tasks(Path(tasks))
    else:
        base, unresolved = Path.cwd(), list(tasks)
    anchored = [task.model_copy(update={"image": anchor_image(task.image, base)}) for task in unresolved]
    return resolve_tasks(anchored, base, config)


def content_key(tasks: Sequence[Task], samples: int) -> str:
    """A submission key that only the same content has."""
    return sha256_hex("\n".join([str(samples), *(task.to_json() for task in tasks)]).encode())[:16]


def check_tasks(tasks: Path | str, config: Path | str | None = None) -> dict[str, int]:
    """Validates a task file as `Run.submit` does; the number of tasks by handler.

    `config` is the YAML file of the run that they are meant for: with it, images are checked too. Raises
    what `Run.submit` raises.
    """
    resolved_config = read_config(config)
    resolved = read_and_check(tasks, resolved_config)
    if config is not None:
        check_images(check_config(resolved_config), resolved)
    return dict(Counter(task.handler for task in resolved))
