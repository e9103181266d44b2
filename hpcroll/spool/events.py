"""What happened, when: one JSON line per event, one file per incarnation, written by its owner alone."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from hpcroll.contract import canonical_json
from hpcroll.fs import RunPaths, list_names, read_fresh, write_all
from hpcroll.spool.incarnation import Incarnation

log = logging.getLogger(__name__)

_OWN_FIELDS = frozenset({"event", "monotonic_s", "unix_s"})


class EventLog:
    """Appends events; each is one write, so that a kill cuts at most the last line. Thread-safe."""

    def __init__(self, incarnation: Incarnation) -> None:
        path = incarnation.paths.events_file(incarnation.id)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._dropped = 0

    def write(self, event: str, **fields: Any) -> None:
        """Writes `event` with `fields` (JSON values) and both clocks' time; not fsynced.

        Events explain a run and decide nothing: where one cannot be written (a full disk) the work goes on,
        and the next that can be is preceded by an event `dropped` that says how many are missing.
        """
        clash = _OWN_FIELDS & fields.keys()
        if clash:
            raise ValueError(f"event {event!r}: {', '.join(sorted(clash))} cannot be fields")
        line = _line(event, fields)
        with self._lock:
            if self._dropped:
                # A new line first: the write that failed may have left half of one.
                line = b"\n" + _line("dropped", {"events": self._dropped}) + line
            try:
                write_all(self._descriptor, line)
            except OSError as error:
                self._dropped += 1
                log.warning("event=%s not written, %d missing: %s", event, self._dropped, error)
            else:
                self._dropped = 0

    def close(self) -> None:
        """Nothing may be written any more."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _line(event: str, fields: dict[str, Any]) -> bytes:
    times = {"monotonic_s": time.monotonic(), "unix_s": time.time()}
    return canonical_json({"event": event, **times, **fields}).encode("ascii") + b"\n"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of an incarnation's events."""

    incarnation: str
    event: str
    monotonic_s: float
    """Seconds on the node's monotonic clock: compare only events of one node and one boot."""
    unix_s: float
    """Seconds of the node's wall clock; for people."""
    fields: dict[str, Any]


def read_events(paths: RunPaths, incarnation: str | None = None) -> Iterator[Event]:
    """The events of one incarnation, or of all, file by file in the order they were written.

    A line that a kill cut short, or that a lost write left a hole in, is left out.
    """
    names = sorted(list_names(paths.events)) if incarnation is None else [f"{incarnation}.jsonl"]
    for name in names:
        owner = name.removesuffix(".jsonl")
        for line in (read_fresh(paths.events / name) or b"").split(b"\n")[:-1]:
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            yield Event(owner, fields.pop("event"), fields.pop("monotonic_s"), fields.pop("unix_s"), fields)
