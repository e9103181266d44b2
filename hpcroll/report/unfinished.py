"""The rollouts of a run that have no result, and what each of them waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpcroll.contract import RolloutRef
from hpcroll.fs import FANOUT_BITS, read_token
from hpcroll.spool import Segment, Spool, WorkerState
from hpcroll.spool.fanout import FanOut

_EXAMPLES = 20
"""Rollouts that are named of each kind."""


class Waiting(StrEnum):
    """Why a rollout has no result."""

    RUNNING = "a worker has it"
    SILENT = "a worker has it of which nobody knows whether it lives"
    LEFT = "its worker is dead; another one has to take it over"
    ENDED = "its attempt ended without a result; another one is due"
    CANCELLED = "it is cancelled, and not committed as such yet"
    HELD = "its submission is held"
    CLOSED = "the run was closed before it was started"
    NOT_STARTED = "nobody has started it"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One rollout without a result."""

    ref: RolloutRef
    leg: str
    """The first leg that is not done."""
    waiting: Waiting
    attempt: int
    """The latest attempt in that leg; 0 for none."""
    incarnation: str | None
    """Who holds that attempt, while it has not ended."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "rollout": self.ref.rollout_id,
            "leg": self.leg,
            "waiting": self.waiting.value,
            "attempt": self.attempt,
            "incarnation": self.incarnation,
        }


@dataclass(frozen=True, slots=True)
class UnfinishedRollouts:
    """How many rollouts have no result, by what they wait for, with some of each by name."""

    total: int
    """Rollouts submitted."""
    counts: dict[Waiting, int]
    examples: tuple[Unfinished, ...]

    @property
    def count(self) -> int:
        return sum(self.counts.values())


def unfinished_rollouts(
    spool: Spool, *, ended: Collection[str], unsure: Collection[str]
) -> UnfinishedRollouts:
    """Counts from the names of every rollout: two listings per 4,096 rollouts and leg, and one open per
    rollout in progress. `ended` and `unsure` are incarnations that are gone, or may be."""
    counts: Counter[Waiting] = Counter()
    examples: list[Unfinished] = []
    segments = spool.segments()
    for segment in segments:
        for rollout in _unfinished_of(spool, segment, ended, unsure):
            counts[rollout.waiting] += 1
            if counts[rollout.waiting] <= _EXAMPLES:
                examples.append(rollout)
    return UnfinishedRollouts(sum(segment.size for segment in segments), dict(counts), tuple(examples))


def ended_of(workers: Collection[WorkerState]) -> set[str]:
    """The incarnations with a recorded end."""
    return {worker.info.incarnation for worker in workers if worker.ended}


def _unfinished_of(
    spool: Spool, segment: Segment, ended: Collection[str], unsure: Collection[str]
) -> Iterator[Unfinished]:
    legs = spool.config.leg_names
    for first in range(0, segment.size, 1 << FANOUT_BITS):
        last = min(first + (1 << FANOUT_BITS), segment.size)
        fanouts = [FanOut(segment.name, first, last) for _ in legs]
        # The last leg first: what is done there meanwhile was done in the legs before it, too.
        for leg, fanout in reversed(list(zip(legs, fanouts, strict=True))):
            fanout.list_anew(spool.paths, leg, None, 0.0)
        for ordinal in range(first, last):
            if ordinal in fanouts[-1].done:
                continue
            stage = next(index for index, fanout in enumerate(fanouts) if ordinal not in fanout.done)
            yield _judge(spool, segment, ordinal, legs[stage], fanouts[stage], ended, unsure)


def _judge(
    spool: Spool,
    segment: Segment,
    ordinal: int,
    leg: str,
    fanout: FanOut,
    ended: Collection[str],
    unsure: Collection[str],
) -> Unfinished:
    ref, attempt = segment.ref(ordinal), fanout.attempts.get(ordinal, 0)
    if fanout.ends.get(ordinal, 0) < attempt:
        holder = read_token(spool.paths.claim_link(leg, ref, attempt))
        if holder in unsure:
            return Unfinished(ref, leg, Waiting.SILENT, attempt, holder)
        waiting = Waiting.LEFT if holder in ended else Waiting.RUNNING
        return Unfinished(ref, leg, waiting, attempt, holder)
    return Unfinished(ref, leg, _idle(spool, segment, ref, attempt), attempt, None)


def _idle(spool: Spool, segment: Segment, ref: RolloutRef, attempt: int) -> Waiting:
    """What a rollout waits for that nobody holds."""
    if spool.wishes.cancels(ref, segment.samples):
        return Waiting.CANCELLED
    if spool.wishes.closed:
        return Waiting.CLOSED
    if spool.wishes.holds(segment.name):
        return Waiting.HELD
    return Waiting.ENDED if attempt else Waiting.NOT_STARTED
