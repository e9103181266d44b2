"""Checks everything that a run's shards promise."""

from hpcroll.shards.verify.report import VerifyReport
from hpcroll.shards.verify.run import verify_run

__all__ = ["VerifyReport", "verify_run"]
