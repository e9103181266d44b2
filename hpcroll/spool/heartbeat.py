"""Heartbeats: one fixed-width record per incarnation, rewritten in place by its owner.

Format: 16 hex digits (xxh3-64 of the rest), a space, JSON padded with spaces, a newline: BEAT_BYTES in all.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import xxhash
from pydantic import Field, ValidationError

from hpcroll.contract import FailureClass, Record, Stage, Status, canonical_json
from hpcroll.fs import read_fresh, write_all
from hpcroll.spool.incarnation import Incarnation

BEAT_BYTES = 2048
_LONGEST_FAILURE = 1200
"""Bytes of the last failure's text, as JSON."""


@dataclass(frozen=True, slots=True)
class BeatCounts:
    """What a heartbeat tells of its worker: totals of this incarnation, but for `stages`."""

    stages: dict[Stage, int] = field(default_factory=dict)
    """Rollouts in each stage now."""
    statuses: dict[Status, int] = field(default_factory=dict)
    """Rollouts that this incarnation committed, by status."""
    failures: dict[FailureClass, int] = field(default_factory=dict)
    """Attempts of this incarnation that failed, by class."""
    last_failure: str = ""
    """The latest failure's text; cut where it is long."""


class Beat(Record):
    """One heartbeat."""

    SCHEMA: ClassVar[str] = "1.0"

    counter: int = Field(ge=1)
    written_at: float
    """Unix seconds on the worker's node; for people."""
    stages: dict[Stage, int] = Field(default_factory=dict)
    statuses: dict[Status, int] = Field(default_factory=dict)
    failures: dict[FailureClass, int] = Field(default_factory=dict)
    last_failure: str = ""


class Heartbeat:
    """Writes the heartbeats of one incarnation; one thread at a time gets in."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._path = incarnation.paths.beat_file(incarnation.id)
        self._counter = 0
        self._lock = threading.Lock()

    def beat(self, counts: BeatCounts) -> None:
        """Writes the next heartbeat; visible to other nodes within the cache time of the file system.

        Raises `OSError` where it could not be written; the counter then names a beat that nobody saw.
        """
        with self._lock:
            self._counter += 1
            data = encode_beat(self._counter, counts)
            # Opened anew for each beat: closing is what sends the bytes to the file server.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                write_all(descriptor, data)
            finally:
                os.close(descriptor)
            self._incarnation.pulse.written()


def encode_beat(counter: int, counts: BeatCounts) -> bytes:
    """The BEAT_BYTES of a heartbeat."""
    beat = Beat(
        counter=counter,
        written_at=time.time(),
        stages=counts.stages,
        statuses=counts.statuses,
        failures=counts.failures,
        last_failure=_cut(counts.last_failure),
    )
    body = beat.to_json().encode("ascii").ljust(BEAT_BYTES - 18)
    return _checksum(body) + b" " + body + b"\n"


def read_beat(path: Path) -> Beat | None:
    """The heartbeat in file `path`; None where there is none, or only half of one just now."""
    data = read_fresh(path)
    return None if data is None else decode_beat(data)


def decode_beat(data: bytes) -> Beat | None:
    """The heartbeat in `data`; None where its checksum does not match."""
    body = data[17:-1]
    if len(data) != BEAT_BYTES or data[:16] != _checksum(body):
        return None
    try:
        return Beat.from_json(body)
    except ValidationError:
        return None


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode("ascii")


def _cut(text: str) -> str:
    """The start of `text` that takes at most `_LONGEST_FAILURE` bytes as ASCII JSON."""
    text = text.encode("utf-8", errors="replace").decode("utf-8")[:_LONGEST_FAILURE]
    while len(canonical_json(text)) > _LONGEST_FAILURE:
        text = text[: len(text) * 3 // 4]
    return text
