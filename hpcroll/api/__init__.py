"""The Python API: what a user writes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcroll.api.configuring import read_config
from hpcroll.api.results import Result
from hpcroll.api.run import Run

if TYPE_CHECKING:
    from hpcroll.api.release_tasks import build_release_task as build_release_task
    from hpcroll.api.submitting import check_tasks as check_tasks

__all__ = ["Result", "Run", "build_release_task", "check_tasks", "read_config"]

_HOMES = {"build_release_task": "hpcroll.api.release_tasks", "check_tasks": "hpcroll.api.submitting"}


def __getattr__(name: str) -> Any:
    # Resolved on first use: handlers and gateway are a second of start-up that reading a run can do without.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hpcroll.api' has no attribute {name!r}")
    return getattr(import_module(home), name)
