"""Pauses: no new model call is admitted while one is in force.

They are one state of the run, `policy/admission/now`, see `state_chain`.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from enum import StrEnum
from typing import ClassVar

from pydantic import Field, ValidationError

from hpcroll.contract import Frozen, Name
from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths
from hpcroll.policy.state_chain import ChainState, StateChain


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


class AdmissionState(ChainState):
    """The pauses in force after the `generation`-th change."""

    SCHEMA: ClassVar[str] = "1.0"

    pauses: tuple[Pause, ...] = ()

    def find(self, name: str) -> Pause | None:
        """The pause of party `name`; None where it has none."""
        return next((pause for pause in self.pauses if pause.name == name), None)


class Pauses:
    """The pauses of one run: read by gateways, changed by trainers and operators. For one thread."""

    def __init__(self, paths: RunPaths) -> None:
        self._chain = StateChain(
            AdmissionState(),
            now=paths.admission_now,
            change=paths.admission_change,
            what="a state of admission",
        )

    def prepare(self) -> None:
        """Makes the name exist that gateways read; for the start of a worker."""
        self._chain.prepare()

    def read(self) -> AdmissionState:
        """The state in force. Opens one file, and never goes back behind what this object has seen."""
        return self._chain.read()

    def put(self, name: str, *, mode: PauseMode, drain_s: float, max_s: float) -> Pause:
        """Sets or renews the pause of party `name`; durable and visible on return."""
        made_by = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}"

        def add(state: AdmissionState) -> AdmissionState:
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
            others = tuple(other for other in state.pauses if other.name != name)
            return state.model_copy(update={"pauses": (*others, pause)})

        pause = self._chain.change(add).find(name)
        assert pause is not None, "the change that was made holds it"
        return pause

    def lift(self, name: str | None = None, *, serial: int | None = None) -> bool:
        """Takes the pause of party `name` back, of every party where absent; whether there was one.

        With `serial`, only where it was not renewed since.
        """
        lifted = False

        def remove(state: AdmissionState) -> AdmissionState:
            nonlocal lifted
            left = tuple(
                pause
                for pause in state.pauses
                if (name is not None and pause.name != name)
                or (serial is not None and pause.serial != serial)
            )
            lifted = left != state.pauses
            return state.model_copy(update={"pauses": left})

        self._chain.change(remove)
        return lifted
