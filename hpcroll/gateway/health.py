"""Which inference servers are put aside, for how long, and when they are asked whether they are back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a server is put aside, and when it returns."""

    first_aside_s: float = 1.0
    """Seconds aside after the first failure; doubled by each further one without a success between."""
    longest_aside_s: float = 60.0
    errors_in_a_row: int = 3
    """Replies with status 500 without a success between that put a server aside: a single request may be
    what one server after the other trips over."""
    quiet_s: float = 30.0
    """Seconds in which none of a server's calls got a byte, after which it is asked whether it lives."""
    probe_timeout_s: float = 10.0
    probes: int = 2
    """Probes in a row that a quiet server may leave unanswered before its calls are given up."""


@dataclass(slots=True)
class _State:
    failures: int = 0
    errors: int = 0
    probes_failed: int = 0
    aside: bool = False
    probe_at: float = 0.0
    busy_until: float = 0.0


class Health:
    """The state of each server, by its name; on the monotonic `clock`."""

    def __init__(self, rules: HealthRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._states: dict[str, _State] = {}

    def is_usable(self, server: str) -> bool:
        """It is neither aside nor busy."""
        state = self._states.get(server)
        return state is None or not (state.aside or self._clock() < state.busy_until)

    def fail(self, server: str) -> None:
        """It could not be reached, or said that it cannot serve: it is put aside."""
        state = self._states.setdefault(server, _State())
        if state.aside and self._clock() < state.probe_at:
            return  # calls that were under way together fail together: one failure, one step of back-off
        state.failures += 1
        state.aside = True
        away_s = self._rules.first_aside_s * 2.0 ** min(state.failures - 1, 30)
        state.probe_at = self._clock() + min(away_s, self._rules.longest_aside_s)

    def err(self, server: str) -> bool:
        """It answered a call with an internal error; whether that put it aside."""
        state = self._states.setdefault(server, _State())
        state.errors += 1
        if state.errors < self._rules.errors_in_a_row:
            return False
        self.fail(server)
        return True

    def busy(self, server: str, for_s: float) -> None:
        """It wants no calls for `for_s` seconds, and is well."""
        state = self._states.setdefault(server, _State())
        state.busy_until = self._clock() + max(for_s, self._rules.first_aside_s)

    def succeed(self, server: str) -> None:
        """It took a call: whatever was, is over."""
        self._states.pop(server, None)

    def probe_is_due(self, server: str) -> bool:
        """It is aside, and its time is over."""
        state = self._states.get(server)
        return state is not None and state.aside and self._clock() >= state.probe_at

    def answered(self, server: str) -> None:
        """It answered a probe: it gets calls again; its next failure puts it aside for longer."""
        state = self._states.get(server)
        if state is not None:
            state.aside, state.errors, state.probes_failed = False, 0, 0

    def unanswered(self, server: str) -> bool:
        """It left a probe unanswered; whether it is given up now, and put aside."""
        state = self._states.setdefault(server, _State())
        state.probes_failed += 1
        if not state.aside and state.probes_failed < self._rules.probes:
            return False
        self.fail(server)
        return True

    def keep(self, servers: set[str]) -> None:
        """Forgets every other server."""
        for gone in self._states.keys() - servers:
            del self._states[gone]
