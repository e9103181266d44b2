"""What a worker knows of the rollouts in one fan-out directory, from listings and from its own answers.

Everything here is a hint that may be tens of seconds old: it decides what is tried, never what is true.
Knowledge only grows (a name that was seen stays), so that an older listing never takes any back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcroll.contract import RolloutRef
from hpcroll.fs import RunPaths, list_names


@dataclass(slots=True)
class FanOut:
    """Rollouts [first, last) of a segment, in one leg."""

    segment: str
    first: int
    last: int
    done: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    """The latest attempt that was seen, by ordinal."""
    ends: dict[int, int] = field(default_factory=dict)
    """The latest attempt whose `.end` was seen, by ordinal."""
    ready: set[int] | None = None
    """Rollouts that the leg before has done; None for the first leg."""
    startable: list[int] = field(default_factory=list)
    """In order: what nobody was seen to run."""
    listed_at_s: float | None = None

    @property
    def complete(self) -> bool:
        """Every rollout is done: nothing here ever changes again."""
        return len(self.done) == self.last - self.first

    @property
    def ref(self) -> RolloutRef:
        """Its first rollout, which names its directories."""
        return RolloutRef(segment=self.segment, ordinal=self.first)

    def list_anew(self, paths: RunPaths, leg: str, previous_leg: str | None, now_s: float) -> None:
        """Lists its directories: two operations, three after the first leg, for thousands of rollouts."""
        if previous_leg is not None:
            names = list_names(paths.done_directory(previous_leg, self.ref))
            self.ready = (self.ready or set()) | set(_ordinals(names))
        for name in list_names(paths.claim_directory(leg, self.ref)):
            self._see_claim(name)
        self.done |= set(_ordinals(list_names(paths.done_directory(leg, self.ref))))
        self.listed_at_s = now_s
        self.startable = [ordinal for ordinal in range(self.first, self.last) if self._is_startable(ordinal)]

    def next_attempt(self, ordinal: int) -> int:
        """The number that the next attempt would have."""
        return self.attempts.get(ordinal, 0) + 1

    def saw_attempt(self, ordinal: int, attempt: int) -> None:
        """Somebody runs `ordinal`."""
        self.attempts[ordinal] = max(attempt, self.attempts.get(ordinal, 0))
        if self.ends.get(ordinal, 0) < self.attempts[ordinal]:
            self.put_off(ordinal)

    def saw_end(self, ordinal: int, attempt: int) -> None:
        """Attempt `attempt` ended without a result; it is startable from the next listing on."""
        self.attempts[ordinal] = max(attempt, self.attempts.get(ordinal, 0))
        self.ends[ordinal] = max(attempt, self.ends.get(ordinal, 0))

    def saw_done(self, ordinal: int) -> None:
        self.done.add(ordinal)
        self.put_off(ordinal)

    def running(self) -> Iterator[tuple[int, int]]:
        """The (ordinal, attempt) pairs that somebody was seen to run."""
        for ordinal, attempt in self.attempts.items():
            if ordinal not in self.done and self.ends.get(ordinal, 0) < attempt:
                yield ordinal, attempt

    def _is_startable(self, ordinal: int) -> bool:
        if ordinal in self.done or (self.ready is not None and ordinal not in self.ready):
            return False
        return self.ends.get(ordinal, 0) >= self.attempts.get(ordinal, 0)

    def _see_claim(self, name: str) -> None:
        ordinal, _, rest = name.partition(".a")
        attempt, dot, suffix = rest.partition(".")
        if not (ordinal.isdecimal() and attempt.isdecimal()):
            return
        if dot and suffix == "end":
            self.saw_end(int(ordinal), int(attempt))
        elif not dot:
            self.attempts[int(ordinal)] = max(int(attempt), self.attempts.get(int(ordinal), 0))

    def put_off(self, ordinal: int) -> None:
        """Takes `ordinal` out of what is startable, until the next listing says otherwise."""
        if ordinal in self.startable:
            self.startable.remove(ordinal)


def _ordinals(names: list[str]) -> Iterator[int]:
    return (int(name) for name in names if name.isdecimal())
