"""Small tasks of every family, written for hpcroll, and scripts that solve some of their rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files

from hpcroll.contract import Task
from hpcroll.tasks import read_tasks
from hpcroll.testing.oracle import mixed_script
from hpcroll.testing.policy_server import Script

FAMILIES = ("math", "stem", "code", "swe", "command")


def demo_tasks(families: Sequence[str] = FAMILIES) -> list[Task]:
    """The demo's tasks, family by family; they need an image with git and Python, and no other file."""
    tasks: list[Task] = []
    for family in families:
        with as_file(files("hpcroll.testing") / "demo_tasks" / f"{family}.jsonl") as path:
            tasks += read_tasks(path)
    return tasks


def demo_scripts(tasks: Sequence[Task] | None = None) -> tuple[Script, ...]:
    """Scripts for the policy server: about two rollouts of three are solved, the others fail."""
    return tuple(mixed_script(task) for task in (demo_tasks() if tasks is None else tasks))
