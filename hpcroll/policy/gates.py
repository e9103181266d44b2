"""Gates: what each worker's gateway says that it did about the pauses, and who has yet to do it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import ClassVar

from pydantic import Field, ValidationError

from hpcroll.contract import Record
from hpcroll.fs import RunPaths, list_names, make_directories, read_fresh, replace
from hpcroll.policy.pauses import Pause, PauseMode


class GateReport(Record):
    """What the gateway of one worker acts on."""

    SCHEMA: ClassVar[str] = "1.0"

    incarnation: str
    generation: int = Field(ge=0)
    """The newest state of admission that it acts on."""
    in_flight: int = Field(ge=0)
    """Calls that it had admitted and that had not ended when it wrote this."""
    silence_s: float = Field(gt=0)
    """Silence of its worker's heartbeat, in seconds, after which it counts as gone."""


class Gate:
    """The report of one worker, written by it alone."""

    def __init__(self, paths: RunPaths, incarnation: str, *, silence_s: float) -> None:
        self._path = paths.gate_file(incarnation)
        self._incarnation = incarnation
        self._silence_s = silence_s
        self._written: tuple[int, int] | None = None

    def report(self, generation: int, in_flight: int) -> None:
        """Says so to everybody; writes nothing where it said the same before."""
        if self._written == (generation, in_flight):
            return
        report = GateReport(
            incarnation=self._incarnation,
            generation=generation,
            in_flight=in_flight,
            silence_s=self._silence_s,
        )
        if self._written is None:
            make_directories([self._path.parent])
        replace(self._path, report.to_json().encode())
        self._written = (generation, in_flight)

    def withdraw(self) -> None:
        """Nobody waits for this worker any more; safe to call again."""
        self._path.unlink(missing_ok=True)


class GateWatch:
    """Tells which gates have yet to act on a pause. Keep it: it learns who is silent over time."""

    def __init__(self, paths: RunPaths, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._beats: dict[str, tuple[bytes | None, float]] = {}
        self._acted: tuple[int, set[str]] = (0, set())
        """The serial of the pause that was asked about last, and who has acted on it: that stays so."""

    def waiting(self, pause: Pause) -> dict[str, str]:
        """Live workers that have yet to act on `pause`, with what is missing; empty once all have."""
        if self._acted[0] != pause.serial:
            self._acted = (pause.serial, set())
        acted = self._acted[1]
        missing = {}
        for incarnation in self._listed():
            report = self._read(incarnation) if incarnation not in acted else None
            if report is None:
                continue
            because = _missing(report, pause)
            if because is None:
                acted.add(incarnation)
            elif not self._is_gone(report):
                missing[incarnation] = because
        return missing

    def _listed(self) -> list[str]:
        # Whoever changes a directory gets a fresh listing of it: others' caches may be a minute behind.
        probe = self._paths.gates / f".look.{secrets.token_hex(6)}"
        make_directories([self._paths.gates])
        probe.touch()
        probe.unlink()
        return sorted(list_names(self._paths.gates))

    def _read(self, incarnation: str) -> GateReport | None:
        data = read_fresh(self._paths.gate_file(incarnation))
        try:
            return None if data is None else GateReport.from_json(data)
        except ValidationError:
            return None

    def _is_gone(self, report: GateReport) -> bool:
        """Its parent said so, or its heartbeat stood still for longer than it may, on our own clock."""
        if read_fresh(self._paths.ended_file(report.incarnation)) is not None:
            return True
        now = self._clock()
        beat = read_fresh(self._paths.beat_file(report.incarnation))
        seen, moved_at = self._beats.get(report.incarnation, (None, now))
        if beat != seen or report.incarnation not in self._beats:
            moved_at = now
        self._beats[report.incarnation] = (beat, moved_at)
        return now - moved_at > report.silence_s


def _missing(report: GateReport, pause: Pause) -> str | None:
    if report.generation < pause.serial:
        return "has not seen the pause yet"
    if pause.mode is PauseMode.CUT and report.in_flight:
        return f"has {report.in_flight} calls in flight"
    return None
