"""One worker: stage pools, deadlines, drain and commit."""

from hpcroll.worker.parent import run_rank as main

__all__ = ["main"]
