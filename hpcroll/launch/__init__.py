"""Launchers: start workers, tell their state, stop them."""

from hpcroll.launch.base import JobHandle, JobState, Launcher
from hpcroll.launch.deaths import Judgement, judge_workers
from hpcroll.launch.record import Launch, LaunchRecord, read_launches
from hpcroll.launch.start import Ranks, load_launcher, preview_workers, start_workers

__all__ = [
    "JobHandle",
    "JobState",
    "Judgement",
    "Launch",
    "LaunchRecord",
    "Launcher",
    "Ranks",
    "judge_workers",
    "load_launcher",
    "preview_workers",
    "read_launches",
    "start_workers",
]
