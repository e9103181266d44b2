"""Trajectories: from recorded model calls to segments, and the invariants that every record keeps."""

from hpcroll.contract.invariants import check, shaped_because
from hpcroll.trajectory.build import Built, build
from hpcroll.trajectory.rows import RowStats, row_stats
from hpcroll.trajectory.sequences import common_length

__all__ = ["Built", "RowStats", "build", "check", "common_length", "row_stats", "shaped_because"]
