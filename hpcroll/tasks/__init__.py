"""Task files, and tasks made from data sets and package releases."""

from hpcroll.tasks.builders import RowFormat, from_gsm8k, from_humaneval, from_jsonl, from_scibench
from hpcroll.tasks.files import read_tasks, resolve_tasks, write_tasks
from hpcroll.tasks.releases import ReleasePair, from_sdist, load_release_task

__all__ = [
    "ReleasePair",
    "RowFormat",
    "from_gsm8k",
    "from_humaneval",
    "from_jsonl",
    "from_scibench",
    "from_sdist",
    "load_release_task",
    "read_tasks",
    "resolve_tasks",
    "write_tasks",
]
