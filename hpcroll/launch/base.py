"""What a launcher is: it starts workers, tells their state and stops them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from hpcroll.config import RunConfig


class JobState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JobHandle:
    """One started rank: the launcher's name for it, and the leg it works on."""

    job_id: str
    leg: str
    log: Path
    """Directory with the rank's output."""


class Launcher(Protocol):
    def __init__(self, run_dir: Path, config: RunConfig) -> None: ...

    def start(self, workers: int, *, leg: str) -> Sequence[JobHandle]:
        """Starts `workers` ranks for `leg`; raises `SubmitError` with the scheduler's own words."""
        ...

    def preview(self, workers: int, *, leg: str) -> str:
        """What `start` would submit, for people."""
        ...

    def states(self, handles: Sequence[JobHandle]) -> Sequence[JobState]:
        """The state of each handle, by one query for all."""
        ...

    def stop(self, handles: Sequence[JobHandle]) -> None:
        """Tells the ranks to drain and end."""
        ...
