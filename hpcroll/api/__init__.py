"""The Python API: what a user writes."""

from hpcroll.api.release_tasks import build_release_task
from hpcroll.api.results import Result
from hpcroll.api.run import Run
from hpcroll.api.submitting import check_tasks, read_config

__all__ = ["Result", "Run", "build_release_task", "check_tasks", "read_config"]
