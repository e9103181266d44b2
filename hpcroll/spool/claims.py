"""Claims: gets the next rollout of a leg for one incarnation, over whatever became of others' attempts."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpcroll.errors import SpoolError
from hpcroll.fs import read_token
from hpcroll.fs.links import MEANT_ERRNOS
from hpcroll.spool.attempts import poisoned_by, read_end
from hpcroll.spool.board import Board, Candidate
from hpcroll.spool.claim import Claim, Fate
from hpcroll.spool.fanout import FanOut
from hpcroll.spool.incarnation import Incarnation
from hpcroll.spool.legs import previous_winner
from hpcroll.spool.liveness import JobEnded, Liveness
from hpcroll.spool.manifest import Segment
from hpcroll.spool.takeover import Takeover

if TYPE_CHECKING:
    from hpcroll.spool.spool import Spool

log = logging.getLogger(__name__)

_TRIES = 64
"""Contested names after which `next` gives way and is called again."""
_LOSSES_BEFORE_LISTING = 4


class Claims:
    """Claims rollouts of one leg for one incarnation. Safe to use from several threads."""

    def __init__(
        self,
        spool: Spool,
        incarnation: Incarnation,
        *,
        job_ended: JobEnded,
        leg: str | None = None,
        limit: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: tells before which position in submission order groups may be started, None: all may.

        It is asked for each claim of the first leg, whatever it raises.
        """
        self._spool = spool
        self._paths = spool.paths
        self._incarnation = incarnation
        legs = spool.config.leg_names
        self._leg = incarnation.leg if leg is None else leg
        if self._leg not in legs:
            raise SpoolError(f"leg {self._leg!r} is none of this run's legs: {', '.join(legs)}")
        self._legs = legs
        self._limit = limit
        self._clock = clock
        self._lock = threading.RLock()
        lease = spool.config.lease
        self._board = Board(
            self._paths,
            legs,
            self._leg,
            relist_s=lease.beat_s,
            is_held=spool.wishes.holds,
            clock=clock,
        )
        self._liveness = Liveness(incarnation, lease, job_ended=job_ended, clock=clock)
        self._takeover = Takeover(incarnation, self._leg, self._liveness, self._board)
        self._random = random.Random(incarnation.id)
        self._recorded: set[tuple[str, int]] = set()
        """What we wrote a record for that may not count: (segment, ordinal)."""
        self._in_flight: dict[tuple[str, int], FanOut] = {}
        self._owed: list[Claim] = []
        self._unsettled: list[tuple[Candidate, int, int | None]] = []
        """Candidate, attempt and previous attempt of links that failed while nobody had the name."""
        self._swept_at_s = clock()

    def next(self) -> Claim | None:
        """The next rollout of the leg, claimed; None where there is nothing to start just now.

        In submission order within a window of a few groups; takes over what dead workers left. A group at or
        beyond the limit is not started, one that was started before goes on. A cancelled or poisoned rollout
        is handed out, too, for its record to be committed. Costs one link where names are not contested;
        called in a loop with nothing to do it rarely touches the file system. Raises `SpoolError` where the
        file system has no space for a name, and `OSError` where it does not answer: call again later,
        nothing is lost.
        """
        with self._lock:
            if self._spool.wishes.closed or self._spool.wishes.draining(self._incarnation.id):
                return None
            self._board.update(self._spool.segments())
            self._liveness.look()
            return self._sweep() or self._take_over(self._wanted) or self._start()

    def cancelled(self) -> Iterator[Claim]:
        """Claims every cancelled rollout that nobody runs, for the `cancelled` record to be committed."""
        with self._lock:
            self._board.update(self._spool.segments())
            self._liveness.look()
            fanouts = [
                (segment, fanout)
                for segment, fanout in self._board.everything()
                if self._spool.wishes.cancels_any_of(segment.name)
            ]
        for segment, fanout in fanouts:
            with self._lock:
                self._board.list_anew(fanout)
                startable = list(fanout.startable)
            for ordinal in startable:
                with self._lock:
                    wanted = self._is_cancelled(segment, ordinal)
                    claim = self._try(Candidate(segment, fanout, ordinal)) if wanted else None
                if claim is not None:
                    yield claim
        while (taken := self._take_over_cancelled()) is not None:
            yield taken

    def finished(self) -> bool:
        """Nothing of the leg is left to do: every submitted rollout is done, or the run is closed.

        From what `next` saw last; True may become False with the next submission.
        """
        with self._lock:
            self._board.update(self._spool.segments())
            return self._spool.wishes.closed or self._board.finished

    @property
    def waits_for_limit(self) -> bool:
        """The last `next` found nothing to start but groups that the limit does not let through yet."""
        with self._lock:
            return self._board.passed_over

    @property
    def needs_successor(self) -> bool:
        """Some rollout is left that only another incarnation may claim: this one wrote a record for it."""
        with self._lock:
            return any(
                (segment.name, ordinal) in self._recorded
                for segment, fanout in self._board.listed()
                for ordinal in fanout.startable
            )

    def _wanted(self, segment: Segment, ordinal: int) -> bool:
        # In flight: somebody may have ended our attempt, but we are still at it.
        key = (segment.name, ordinal)
        return key not in self._recorded and key not in self._in_flight

    def _is_cancelled(self, segment: Segment, ordinal: int) -> bool:
        return self._wanted(segment, ordinal) and self._spool.wishes.cancels(
            segment.ref(ordinal), segment.samples
        )

    def _cancelled_of(self, segment: Segment) -> Callable[[int], bool] | None:
        """Tells which rollouts of `segment` are cancelled; None where none is."""
        if not self._spool.wishes.cancels_any_of(segment.name):
            return None
        return lambda ordinal: self._is_cancelled(segment, ordinal)

    def _start(self) -> Claim | None:
        """Claims from our own lane of the window where it has any, so that workers rarely contest a name."""
        lane, lanes = self._liveness.place()
        # What a later leg gets was started already.
        limit = self._limit() if self._leg == self._legs[0] else None
        listed = False
        for loss in range(1, _TRIES + 1):
            window = self._board.window(self._wanted, workers=lanes, limit=limit, exempt=self._cancelled_of)
            if not window or self._unsettled:
                return None
            ours = [candidate for candidate in window if candidate.ordinal % lanes == lane]
            if not listed and (not ours or loss % _LOSSES_BEFORE_LISTING == 0):
                # Others' lanes are what they have not claimed yet, or what we have not seen them claim.
                for fanout in {id(candidate.fanout): candidate.fanout for candidate in window}.values():
                    self._board.list_anew(fanout)
                listed = True
                continue
            # Squared: the front is chosen most, so that no rollout is passed over for long.
            others = window[int(len(window) * self._random.random() ** 2)]
            claim = self._try(ours[0] if ours else others)
            if claim is not None:
                return claim
            listed = False
        return None

    def _take_over(self, wanted: Callable[[Segment, int], bool]) -> Claim | None:
        """The next attempt at a rollout that a dead incarnation holds; ends that attempt first."""
        for candidate in self._takeover.ended_attempts(wanted):
            claim = self._try(candidate)
            if claim is not None:
                return claim
        return None

    def _take_over_cancelled(self) -> Claim | None:
        with self._lock:
            return self._take_over(self._is_cancelled)

    def _try(self, candidate: Candidate) -> Claim | None:
        """Claims the next attempt of `candidate`; None where another has it, or it needs none."""
        fanout, ordinal, ref = candidate.fanout, candidate.ordinal, candidate.ref
        previous = previous_winner(self._paths, self._legs, self._leg, ref)
        if previous is not None and previous.final:
            # Its committer died between two names: the rollout ended for all legs, and anyone may say so.
            previous.spread_to(self._leg)
            fanout.saw_done(ordinal)
            return None
        return self._link(
            candidate, fanout.next_attempt(ordinal), None if previous is None else previous.attempt()
        )

    def _link(self, candidate: Candidate, attempt: int, previous_attempt: int | None) -> Claim | None:
        ref = candidate.ref
        try:
            mine = self._incarnation.claim(self._paths.claim_link(self._leg, ref, attempt))
        except OSError as error:
            if error.errno in MEANT_ERRNOS:
                raise SpoolError(
                    f"rollout {ref} cannot be claimed: {error.strerror}; free space on {self._paths.root}"
                ) from error
            # Neither ours nor another's, and it may still appear: the next sweep asks again.
            log.warning("rollout=%s attempt=%d claim=unsettled: %s", ref, attempt, error)
            self._unsettled.append((candidate, attempt, previous_attempt))
            candidate.fanout.put_off(candidate.ordinal)
            return None
        candidate.fanout.saw_attempt(candidate.ordinal, attempt)
        if not mine:
            return None
        try:
            return self._claimed(candidate, attempt, previous_attempt)
        except Exception:
            # The name is ours all the same: the next sweep must find it, or nobody ever runs the rollout.
            self._unsettled.append((candidate, attempt, previous_attempt))
            raise

    def _claimed(self, candidate: Candidate, attempt: int, previous_attempt: int | None) -> Claim | None:
        ref, segment = candidate.ref, candidate.segment
        if attempt > 1 and read_token(self._paths.done_link(self._leg, ref)) is not None:
            # An earlier attempt, thought dead, committed after all.
            candidate.fanout.saw_done(candidate.ordinal)
            return None
        ends = [read_end(self._paths.end_file(self._leg, ref, number)) for number in range(1, attempt)]
        failures = tuple(end.failure for end in ends if end is not None)
        self._in_flight[segment.name, candidate.ordinal] = candidate.fanout
        return Claim(
            rollout=segment.rollout(candidate.ordinal),
            leg=self._leg,
            attempt=attempt,
            failures=failures,
            poisoned=poisoned_by(failures, self._spool.config.attempts),
            cancelled=self._spool.wishes.cancels(ref, segment.samples),
            previous_attempt=previous_attempt,
            submitted_at=segment.submitted_at,
            later_legs=self._legs[self._legs.index(self._leg) + 1 :],
            incarnation=self._incarnation,
            tell=self._told,
        )

    def _told(self, claim: Claim, fate: Fate) -> None:
        ref = claim.rollout.ref
        key = (ref.segment, ref.ordinal)
        with self._lock:
            if fate is Fate.RECORDED:
                self._recorded.add(key)
                return
            if fate is Fate.OWED:
                if claim not in self._owed:
                    self._owed.append(claim)
                return
            fanout = self._in_flight.pop(key, None)
            if fanout is None:
                return
            if fate is Fate.DONE:
                fanout.saw_done(ref.ordinal)
                self._recorded.discard(key)
            else:
                fanout.saw_end(ref.ordinal, claim.attempt)

    def _sweep(self) -> Claim | None:
        """Once a heartbeat: pays owed ends, and settles names whose answer never came.

        Only a link whose answer was no answer can leave a name of ours that we do not remember.
        """
        if self._clock() - self._swept_at_s < self._spool.config.lease.beat_s:
            return None
        self._swept_at_s = self._clock()
        self._owed = [claim for claim in self._owed if not claim.pay()]
        pending, self._unsettled = self._unsettled, []
        try:
            while pending:
                claim = self._link(*pending[-1])
                pending.pop()
                if claim is not None:
                    return claim
            return None
        finally:
            self._unsettled += pending
