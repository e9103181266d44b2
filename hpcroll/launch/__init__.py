"""Launchers: start workers, tell their state, stop them."""

from hpcroll.launch.base import JobHandle, JobState, Launcher
from hpcroll.launch.record import Launch, LaunchRecord, read_launches
from hpcroll.launch.start import Ranks, load_launcher, preview_workers, start_workers

__all__ = [
    "JobHandle",
    "JobState",
    "Launch",
    "LaunchRecord",
    "Launcher",
    "Ranks",
    "load_launcher",
    "preview_workers",
    "read_launches",
    "start_workers",
]
