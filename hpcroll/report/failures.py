"""One example of each class of failure, from the ends of the workers' event files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcroll.contract import FailureClass
from hpcroll.fs import RunPaths
from hpcroll.spool import RunCounts

_TAIL_BYTES = 65_536
"""Events of one worker that are looked at: `status` costs the same however long a run is."""


@dataclass(frozen=True, slots=True)
class FailureExample:
    """The failed attempts of one class, and the latest of them that was found."""

    failure_class: FailureClass
    count: int
    text: str
    """Rollout, attempt, stage, error and node in one line; empty where no example was found."""


def failure_examples(paths: RunPaths, counts: RunCounts) -> tuple[FailureExample, ...]:
    """One entry per class that has failures, in the order of the classes."""
    latest: dict[str, dict[str, Any]] = {}
    for worker in counts.workers:
        if worker.beat is not None and any(worker.beat.failures.values()):
            for event in _last_failures(paths.events_file(worker.info.incarnation)):
                known = latest.get(event["reason"])
                if known is None or known["unix_s"] <= event["unix_s"]:
                    latest[event["reason"]] = event
    return tuple(
        FailureExample(name, counts.failures[name], _line(latest.get(name.value)))
        for name in FailureClass
        if counts.failures.get(name)
    )


def _last_failures(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the first line may be cut by the seek, the last by a kill
        if isinstance(event, dict) and event.get("event") == "failed" and "reason" in event:
            events.append(event)
    return events


def _line(event: dict[str, Any] | None) -> str:
    if event is None:
        return ""
    where = f"rollout {event.get('rollout')} attempt {event.get('attempt')}"
    stage = f" in {event['stage']}" if event.get("stage") else ""
    node = f" on {event['node']}" if event.get("node") else ""
    return " ".join(f"{where}{stage}{node}: {event.get('error')}: {event.get('message')}".split())
