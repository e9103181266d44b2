"""A claim: one attempt at one rollout in one leg, and the ways it can end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from hpcroll.contract import EndReason, Failure, FailureClass, Rollout
from hpcroll.errors import SpoolError
from hpcroll.fs import RunPaths, fsync_directory
from hpcroll.spool.attempts import read_end, write_end
from hpcroll.spool.incarnation import Incarnation

log = logging.getLogger(__name__)


class Fate(Enum):
    """What became of a claim, for its `Claims`."""

    RECORDED = auto()
    """A record or bundle exists: this incarnation never claims the rollout again."""
    DONE = auto()
    """The rollout is done in this leg, by this claim or another."""
    ENDED = auto()
    """The attempt ended without a result."""
    OWED = auto()
    """The attempt ended, but its `.end` could not be written yet."""


@dataclass(eq=False)
class Claim:
    """Attempt `attempt` at `rollout` in leg `leg`, ours until it ends. Safe to use from one thread at a time.

    A commit goes: `still_mine`, `note_record`, append the record and fsync, `link_done`,
    `sync_done_directories`, mark. In any leg but the last, a commit with a record ends the rollout for all
    legs, and one without hands the bundle of this attempt to the next.
    """

    rollout: Rollout
    leg: str
    attempt: int
    failures: tuple[Failure, ...]
    """Why each earlier attempt in this leg ended, oldest first."""
    poisoned: FailureClass | None
    """Set past the cap of that class: commit a `failed` record, do not run it."""
    cancelled: bool
    """Nobody wants it: commit a `cancelled` record, do not run it."""
    previous_attempt: int | None
    """The attempt that won the leg before, whose bundle this one starts from; None in the first leg."""
    submitted_at: float
    later_legs: tuple[str, ...]
    incarnation: Incarnation
    tell: Callable[[Claim, Fate], None] = field(repr=False)
    won: bool = field(default=False, init=False)
    """True once `link_done` made this attempt's result the rollout's."""
    recorded: bool = field(default=False, init=False)
    owed: Failure | None = field(default=None, init=False)

    @property
    def paths(self) -> RunPaths:
        return self.incarnation.paths

    @property
    def cause(self) -> Failure | None:
        """The latest failure of the class that poisoned the rollout; None where nothing did."""
        silent = EndReason.SILENCE if self.poisoned is FailureClass.KILL else None
        reasons = {silent, None if self.poisoned is None else EndReason(self.poisoned.value)}
        return next((failure for failure in reversed(self.failures) if failure.reason in reasons), None)

    @property
    def bundle(self) -> Path:
        """Where this attempt publishes what the next leg needs, before `link_done`."""
        return self.paths.bundle_file(self.leg, self.rollout.ref, self.attempt)

    def still_mine(self) -> bool:
        """False once somebody took the rollout over, or it was released: discard what it produced.

        False ends the claim for this incarnation, too; nothing more needs to be said of it.
        """
        if read_end(self._end_file) is None:
            return True
        self.tell(self, Fate.ENDED)
        return False

    def note_record(self) -> None:
        """Call before the first byte of the record is written.

        From then on this incarnation never claims the rollout again, so that (rollout, incarnation) names
        one record.
        """
        self.recorded = True
        self.tell(self, Fate.RECORDED)

    def link_done(self) -> bool:
        """Makes the durable result the rollout's; False where another attempt's is.

        Durable after `sync_done_directories`. Repeatable. Raises `SpoolError` where the name could not be
        made: the result may or may not count then, and only a new incarnation may try the rollout again.
        """
        self.tell(self, Fate.RECORDED)
        final = self.recorded and bool(self.later_legs)
        try:
            self.won = self.incarnation.claim(self.paths.done_link(self.leg, self.rollout.ref), final=final)
            if self.won and final:
                for leg in self.later_legs:
                    self.incarnation.claim(self.paths.done_link(leg, self.rollout.ref), final=True)
        except OSError as error:
            raise SpoolError(
                f"rollout {self.rollout.ref} attempt {self.attempt}: its result is written but cannot be "
                f"made visible ({error.strerror}); free space on {self.paths.root}; another worker tries it "
                "again"
            ) from error
        self.tell(self, Fate.DONE)
        return self.won

    def commit(self) -> bool:
        """`link_done` made durable; for callers that do not share fsyncs."""
        won = self.link_done()
        sync_done_directories([self])
        return won

    def release(self) -> bool:
        """Ends the attempt as a planned stop: it spends no retry, and others may start the rollout.

        False where it could not be written just now; then it is tried again until this incarnation ends.
        """
        return self._end(Failure(attempt=self.attempt, reason=EndReason.RELEASED))

    def fail(self, failure: Failure) -> bool:
        """Ends the attempt for `failure`; returns like `release`. The first word on an attempt stays."""
        return self._end(failure)

    def pay(self) -> bool:
        """Tries again to write an end that could not be written."""
        return self.owed is None or self._end(self.owed)

    @property
    def done_directories(self) -> list[Path]:
        """The directories in which `link_done` made names."""
        legs = [self.leg, *(self.later_legs if self.recorded else ())] if self.won else []
        return [self.paths.done_directory(leg, self.rollout.ref) for leg in legs]

    @property
    def _end_file(self) -> Path:
        return self.paths.end_file(self.leg, self.rollout.ref, self.attempt)

    def _end(self, failure: Failure) -> bool:
        own = {"attempt": self.attempt, "incarnation": self.incarnation.id, "node": self.incarnation.host}
        failure = failure.model_copy(update=own)
        try:
            write_end(self._end_file, failure, ended_by=self.incarnation.id)
        except OSError as error:
            # A full disk must not end the worker as well: the end is owed, and paid when there is space.
            log.warning(
                "rollout=%s attempt=%d end=%s not written: %s",
                *(self.rollout.ref, self.attempt, failure.reason, error),
            )
            self.owed = failure
            self.tell(self, Fate.OWED)
            return False
        self.owed = None
        self.tell(self, Fate.ENDED)
        return True


def sync_done_directories(claims: Sequence[Claim]) -> None:
    """Makes the done names of `claims` durable: one fsync per directory, however many rollouts share it."""
    for directory in dict.fromkeys(path for claim in claims for path in claim.done_directories):
        fsync_directory(directory)
