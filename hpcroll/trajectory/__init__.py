"""Trajectories: from recorded model calls to segments, and the invariants that every record keeps."""

from hpcroll.contract.invariants import check, shaped_because
from hpcroll.trajectory.build import Built, build
from hpcroll.trajectory.sequences import common_length

__all__ = ["Built", "build", "check", "common_length", "shaped_because"]
