"""Pauses: no new model call is admitted while one is in force.

A chain of immutable files gives the changes one order, as it does to versions; `policy/admission/now` is
replaced by the newest of them. Gateways read that one name only. It exists from the first worker's start on
and is never deleted: a name that a network file system has cached as missing would be seen too late.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar

from pydantic import Field, ValidationError

from hpcroll.contract import Frozen, Name, Record
from hpcroll.errors import ConfigError, CorruptRecordError
from hpcroll.fs import RunPaths, make_directories, publish, read_fresh, replace


class PauseMode(StrEnum):
    """What becomes of the calls that are in flight when a pause begins."""

    CUT = "cut"
    """They may finish for `drain_s`, then they are cut and sent again after the pause."""
    KEEP = "keep"
    """They go on: the engine itself holds them while it changes its weights."""


class Pause(Frozen):
    """One party's wish that no new model call is admitted."""

    name: Name
    """Whose it is; a party has one pause."""
    serial: int = Field(ge=1)
    """The generation of the state that set it or renewed it last."""
    mode: PauseMode = PauseMode.CUT
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds, from when a gateway sees the pause, that calls in flight may take (`cut`)."""
    max_s: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds, from when a gateway sees it, after which it no longer counts."""
    made_by: str = ""
    made_at: float = 0.0
    """Unix seconds on the maker's node; for people, never compared."""


class AdmissionState(Record):
    """The pauses in force after the `generation`-th change."""

    SCHEMA: ClassVar[str] = "1.0"

    generation: int = Field(ge=0)
    pauses: tuple[Pause, ...] = ()

    def find(self, name: str) -> Pause | None:
        """The pause of party `name`; None where it has none."""
        return next((pause for pause in self.pauses if pause.name == name), None)


_OPEN = AdmissionState(generation=0)


class Pauses:
    """The pauses of one run: read by gateways, changed by trainers and operators. For one thread."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._newest = _OPEN

    def prepare(self) -> None:
        """Makes the name exist that gateways read; for the start of a worker."""
        make_directories([self._paths.admission_now.parent])
        publish(self._paths.admission_now, _OPEN.to_json().encode())

    def read(self) -> AdmissionState:
        """The state in force. Opens one file, and never goes back behind what this object has seen."""
        data = read_fresh(self._paths.admission_now)
        if data is not None:
            state = self._parse(data, str(self._paths.admission_now))
            if state.generation > self._newest.generation:
                self._newest = state
        return self._newest

    def put(self, name: str, *, mode: PauseMode, drain_s: float, max_s: float) -> Pause:
        """Sets or renews the pause of party `name`; durable and visible on return."""
        made_by = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"

        def add(state: AdmissionState) -> tuple[Pause, ...]:
            try:
                pause = Pause(
                    name=name,
                    serial=state.generation + 1,
                    mode=mode,
                    drain_s=drain_s,
                    max_s=max_s,
                    made_by=made_by,
                    made_at=time.time(),
                )
            except ValidationError as error:
                raise ConfigError(f"pause {name!r} cannot be set: {error}") from error
            return (*(other for other in state.pauses if other.name != name), pause)

        pause = self._change(add).find(name)
        assert pause is not None, "the change that was made holds it"
        return pause

    def lift(self, name: str | None = None, *, serial: int | None = None) -> bool:
        """Takes the pause of party `name` back, of every party where absent; whether there was one.

        With `serial`, only where it was not renewed since.
        """
        lifted = False

        def remove(state: AdmissionState) -> tuple[Pause, ...]:
            nonlocal lifted
            left = tuple(
                pause
                for pause in state.pauses
                if (name is not None and pause.name != name)
                or (serial is not None and pause.serial != serial)
            )
            lifted = left != state.pauses
            return left

        self._change(remove)
        return lifted

    def _change(self, edit: Callable[[AdmissionState], tuple[Pause, ...]]) -> AdmissionState:
        make_directories([self._paths.admission_now.parent])
        while True:
            state = self._walk()
            pauses = edit(state)
            if pauses != state.pauses:
                # One winner per place: whoever loses it looks at the winner's change before it goes on.
                changed = AdmissionState(generation=state.generation + 1, pauses=pauses)
                path = self._paths.admission_change(changed.generation)
                if not publish(path, changed.to_json().encode()):
                    continue
                state = changed
            self._repair_now()
            return state

    def _walk(self) -> AdmissionState:
        """The last change of the chain; the name `now` may be behind it where its writer died."""
        state = self.read()
        while (data := read_fresh(path := self._paths.admission_change(state.generation + 1))) is not None:
            state = self._newest = self._parse(data, str(path))
        return state

    def _repair_now(self) -> None:
        while True:
            newest = self._walk()
            data = newest.to_json().encode()
            if read_fresh(self._paths.admission_now) == data:
                return
            replace(self._paths.admission_now, data)

    @staticmethod
    def _parse(data: bytes, where: str) -> AdmissionState:
        try:
            return AdmissionState.from_json(data)
        except ValidationError as error:
            raise CorruptRecordError(f"{where} is not a state of admission: {error}") from error
