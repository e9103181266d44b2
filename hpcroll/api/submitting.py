"""From what a user gives to the tasks that are submitted; nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpcroll.api.configuring import anchor_image, read_config
from hpcroll.api.validation import check_config, check_images
from hpcroll.config import RunConfig
from hpcroll.contract import Task, sha256_hex
from hpcroll.tasks import read_tasks, resolve_tasks


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
