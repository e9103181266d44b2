"""What workers wrote: the ends of their logs, and the events of one rollout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths
from hpcroll.spool import read_events

_LOG_NAMES = ("*.log", "*.out", "*.err")
_LONGEST_TAIL = 262_144


def log_tails(run_dir: Path, *, lines: int) -> list[dict[str, str]]:
    """The last `lines` lines of each log of the run's launches, oldest launch first."""
    paths = RunPaths(run_dir)
    if not paths.run_json.exists():
        raise ConfigError(f"{run_dir} holds no run (no run.json); check the path")
    found = (path for pattern in _LOG_NAMES for path in paths.launches.glob(f"*/{pattern}"))
    return [{"log": str(path), "text": _tail(path, lines)} for path in sorted(found)]


def rollout_events(run_dir: Path, rollout_id: str) -> list[dict[str, Any]]:
    """What happened to one rollout on every worker, in the order of the nodes' wall clocks."""
    events = [
        {
            "unix_s": event.unix_s,
            "worker": event.incarnation,
            "event": event.event,
            "attempt": event.fields.get("attempt"),
            "detail": _detail(event.fields),
        }
        for event in read_events(RunPaths(run_dir))
        if event.fields.get("rollout") == rollout_id
    ]
    return sorted(events, key=lambda event: float(event["unix_s"]))


def _detail(fields: dict[str, Any]) -> str:
    shown = {name: value for name, value in fields.items() if name not in ("rollout", "attempt") and value}
    return " ".join(f"{name}={value}" for name, value in shown.items())


def _tail(path: Path, lines: int) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LONGEST_TAIL))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
