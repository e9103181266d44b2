"""What one worker may start next in its leg, in order; see `fanout` for how little that proves."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from hpcroll.contract import RolloutRef
from hpcroll.fs import FANOUT_BITS, RunPaths
from hpcroll.spool.fanout import FanOut
from hpcroll.spool.manifest import Segment

WINDOW_ROLLOUTS = 32
"""Workers choose among whole groups until they hold this many rollouts, or two of every worker: enough
that workers rarely meet, few enough that groups complete early."""

_BEYOND_S = 30.0
"""Seconds between two looks for started groups in a directory that lies beyond the limit."""
_IDLE_FIRST_S = 0.25
_IDLE_LONGEST_S = 5.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rollout that may be startable."""

    segment: Segment
    fanout: FanOut
    ordinal: int

    @property
    def ref(self) -> RolloutRef:
        return self.segment.ref(self.ordinal)


@dataclass(frozen=True, slots=True)
class _Look:
    """What is looked for; see `Board.window`."""

    wanted: Callable[[Segment, int], bool]
    size: int
    limit: int | None
    exempt: Callable[[Segment], Callable[[int], bool] | None]


class Board:
    """The rollouts of one leg that are not known to be done. Not thread-safe; its owner serialises."""

    def __init__(
        self,
        paths: RunPaths,
        legs: tuple[str, ...],
        leg: str,
        *,
        relist_s: float,
        is_held: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._leg = leg
        index = legs.index(leg)
        self._previous_leg = legs[index - 1] if index else None
        self._relist_s = relist_s
        self._is_held = is_held
        self._idle_s = _IDLE_FIRST_S
        self._clock = clock
        self._known: set[str] = set()
        self._open: list[tuple[Segment, list[FanOut]]] = []
        self._first_group: dict[str, int] = {}
        """The position of each segment's first group among all groups, in submission order."""
        self.passed_over = False
        """The last look left something startable alone because it lies beyond the limit."""
        self.listings = 0
        """Grows with every listing: what was scanned before need not be scanned again until then."""

    def update(self, segments: tuple[Segment, ...]) -> None:
        """Takes in segments that appeared since; they stand in the order of `segments`."""
        fresh = [segment for segment in segments if segment.name not in self._known]
        if not fresh:
            return
        order = {segment.name: index for index, segment in enumerate(segments)}
        self._known |= {segment.name for segment in fresh}
        firsts = accumulate((segment.header.tasks for segment in segments), initial=0)
        self._first_group = {
            # A listing that was made while segments appeared may lack an earlier one.
            segment.name: max(first, segment.header.groups_before)
            for segment, first in zip(segments, firsts, strict=False)
        }
        self._open += [(segment, _fan_outs(segment)) for segment in fresh]
        self._open.sort(key=lambda item: order[item[0].name])

    def window(
        self,
        wanted: Callable[[Segment, int], bool],
        *,
        workers: int,
        limit: int | None = None,
        exempt: Callable[[Segment], Callable[[int], bool] | None] = lambda _segment: None,
    ) -> list[Candidate]:
        """The next few groups' startable rollouts for which `wanted(segment, ordinal)` holds.

        Groups at position `limit` and beyond only where one of theirs was started before, and the rollouts
        of a segment for which what `exempt` gives for it, if anything, holds. Lists what was never listed,
        and again what was listed long ago; where there is nothing to start, it lists with back-off and is
        otherwise free of input and output.
        """
        look = _Look(wanted, max(WINDOW_ROLLOUTS, 2 * workers), limit, exempt)
        window = self._gather(look, self._relist_s)
        if not window:
            window = self._gather(look, self._idle_s)
            grown = self._idle_s * 1.5
            self._idle_s = _IDLE_FIRST_S if window else min(grown, _IDLE_LONGEST_S)
        else:
            self._idle_s = _IDLE_FIRST_S
        return window

    def listed(self) -> Iterator[tuple[Segment, FanOut]]:
        """Every fan-out directory that was listed, is not known to be complete and not held, in order."""
        for segment, fanouts in self._open:
            if self._is_held(segment.name):
                continue
            for fanout in fanouts:
                if fanout.listed_at_s is not None:
                    yield segment, fanout

    def list_anew(self, fanout: FanOut) -> None:
        """Lists one fan-out directory now: others are ahead of what we know."""
        fanout.list_anew(self._paths, self._leg, self._previous_leg, self._clock())
        self.listings += 1

    def everything(self) -> Iterator[tuple[Segment, FanOut]]:
        """Every fan-out directory that is not known to be complete, listed now or never, in order."""
        for segment, fanouts in self._open:
            for fanout in fanouts:
                yield segment, fanout

    @property
    def finished(self) -> bool:
        """Every known rollout of the leg is known to be done."""
        self._forget_complete()
        return not self._open

    def _gather(self, look: _Look, stale_s: float) -> list[Candidate]:
        window: list[Candidate] = []
        self.passed_over = False
        self._forget_complete()
        for segment, fanouts in self._open:
            if self._is_held(segment.name):
                continue
            for index, fanout in enumerate(fanouts):
                allowed = self._allowed(segment, look.limit)
                beyond = fanout.first >= allowed
                self._list_if_stale(fanout, max(stale_s, _BEYOND_S) if beyond else stale_s)
                ordinals = fanout.startable
                if fanout.last > allowed:
                    started = _started_groups(segment, fanouts, index)
                    if beyond and not started:
                        # Rollouts are started in order: there is no started group further on either.
                        self.passed_over = True
                        return window
                    ordinals = _let_through(segment, ordinals, allowed, started, look.exempt(segment))
                    self.passed_over |= len(ordinals) < len(fanout.startable)
                for ordinal in ordinals:
                    if len(window) >= look.size and _begins_group(window[-1], segment, ordinal):
                        return window
                    if look.wanted(segment, ordinal):
                        window.append(Candidate(segment, fanout, ordinal))
        return window

    def _allowed(self, segment: Segment, limit: int | None) -> int:
        """How many of the segment's rollouts, from its first on, the limit lets through."""
        if limit is None:
            return segment.size
        return max(0, limit - self._first_group[segment.name]) * segment.samples

    def _list_if_stale(self, fanout: FanOut, stale_s: float) -> None:
        if fanout.complete:
            return
        if fanout.listed_at_s is None or self._clock() - fanout.listed_at_s >= stale_s:
            self.list_anew(fanout)

    def _forget_complete(self) -> None:
        for segment, fanouts in self._open:
            fanouts[:] = [fanout for fanout in fanouts if not fanout.complete]
            if not fanouts:
                self._open = [item for item in self._open if item[0] is not segment]


def _begins_group(last: Candidate, segment: Segment, ordinal: int) -> bool:
    same_segment = last.segment is segment
    return not same_segment or last.ordinal // segment.samples != ordinal // segment.samples


def _let_through(
    segment: Segment,
    startable: list[int],
    allowed: int,
    started: set[int],
    exempt: Callable[[int], bool] | None,
) -> list[int]:
    """What of `startable` is below `allowed`, of a started group or exempt."""
    first_beyond = bisect_left(startable, allowed)
    below, beyond = startable[:first_beyond], startable[first_beyond:]
    if exempt is None and max(started, default=-1) * segment.samples < allowed:
        return below
    return below + [
        ordinal
        for ordinal in beyond
        if ordinal // segment.samples in started or (exempt is not None and exempt(ordinal))
    ]


def _started_groups(segment: Segment, fanouts: list[FanOut], index: int) -> set[int]:
    """Task indices of the groups in `fanouts[index]` of which somebody was seen to start a rollout."""
    fanout, samples = fanouts[index], segment.samples
    started = {ordinal // samples for ordinal in fanout.attempts}
    if fanout.first % samples:
        # A group that begins in the directory before; one that is known to be complete is not kept.
        before = fanouts[index - 1] if index and fanouts[index - 1].last == fanout.first else None
        shared = fanout.first // samples
        if before is None or any(ordinal // samples == shared for ordinal in before.attempts):
            started.add(shared)
    return started


def _fan_outs(segment: Segment) -> list[FanOut]:
    width = 1 << FANOUT_BITS
    return [
        FanOut(segment.name, first, min(first + width, segment.size))
        for first in range(0, segment.size, width)
    ]
