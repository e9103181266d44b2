"""For tests and demos: a scripted policy server, and the contract suites for plug-in authors."""

from hpcroll.contract.invariants import check
from hpcroll.testing.trajectories import random_calls, random_trajectory

__all__ = ["check", "random_calls", "random_trajectory"]
