"""Finishes what dead workers left, so that no reader waits for a mark that nobody will write."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hpcroll.fs import fsync_directory, list_names
from hpcroll.launch import Judgement, judge_workers
from hpcroll.report.unfinished import UnfinishedRollouts, ended_of, unfinished_rollouts
from hpcroll.shards import adopt
from hpcroll.spool import Spool, mark_ended, read_workers
from hpcroll.spool.legs import previous_winner


@dataclass(frozen=True, slots=True)
class SealReport:
    """What sealing did, and what it had to leave."""

    ended: dict[str, str]
    """Incarnations whose end it recorded, and how that end is known."""
    alive: tuple[str, ...]
    """Incarnations that live; they write their own marks."""
    unsure: dict[str, str]
    """Incarnations of which nobody can say from here whether they live, and why; they are left alone."""
    indexed: int
    """Committed records of dead workers that no mark named; now an index does."""
    carried: int
    """Rollouts that had ended in an early leg and were not named in the later ones yet."""
    cancelled: int
    """Cancelled rollouts that nobody ran any more, committed as such."""
    unfinished: UnfinishedRollouts
    closed: bool

    @property
    def complete(self) -> bool:
        """Every rollout that was submitted has its result."""
        return self.unfinished.count == 0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        left = self.unfinished
        return {
            "ended": self.ended,
            "alive": list(self.alive),
            "unsure": self.unsure,
            "indexed": self.indexed,
            "carried": self.carried,
            "cancelled": self.cancelled,
            "total": left.total,
            "complete": self.complete,
            "closed": self.closed,
            "unfinished": {
                "count": left.count,
                "waiting": {waiting.value: count for waiting, count in left.counts.items()},
                "examples": [rollout.to_dict() for rollout in left.examples],
            },
        }


def seal(
    spool: Spool,
    *,
    gone: Collection[str] = (),
    close: bool = False,
    judge: Callable[..., Judgement] = judge_workers,
) -> SealReport:
    """Records the ends of dead workers, indexes what they committed, and says what is still open.

    `gone` names incarnations that an operator knows to be dead. `close` closes the run where every
    rollout has its result. Harmless beside live workers and other sealers, repeatable, and safe to
    interrupt. Raises `ConfigError` for a name in `gone` that is no incarnation, or that lives.
    """
    judgement = judge(spool, gone=gone)
    for incarnation in judgement.dead:
        mark_ended(spool.paths, incarnation)
    ended = ended_of(read_workers(spool.paths))
    indexed = sum(adopt(spool.paths, incarnation) for incarnation in sorted(ended))
    carried = _carry_through(spool)
    cancelled = _commit_cancelled(spool)
    unfinished = unfinished_rollouts(spool, ended=ended, unsure=judgement.unsure)
    if close and unfinished.count == 0:
        spool.wishes.close()
    return SealReport(
        ended=judgement.dead,
        alive=tuple(sorted(judgement.alive)),
        unsure=judgement.unsure,
        indexed=indexed,
        carried=carried,
        cancelled=cancelled,
        unfinished=unfinished,
        closed=spool.wishes.closed,
    )


def _carry_through(spool: Spool) -> int:
    """Names in the later legs what ended for good in an earlier one; its committer may have died between."""
    legs = spool.config.leg_names
    carried = 0
    for before, leg in pairwise(legs):
        for segment in spool.segments():
            carried += _carry_into(spool, segment.name, before, leg)
    return carried


def _carry_into(spool: Spool, segment: str, before: str, leg: str) -> int:
    paths, legs = spool.paths, spool.config.leg_names
    carried = 0
    for fanout in list_names(paths.done / before / segment):
        done = set(list_names(paths.done / leg / segment / fanout))
        count = 0
        for name in list_names(paths.done / before / segment / fanout):
            if name in done or not name.isdecimal():
                continue
            ref = spool.segment(segment).ref(int(name))
            winner = previous_winner(paths, legs, leg, ref)
            if winner is not None and winner.final:
                winner.spread_to(leg)
                count += 1
        if count:
            fsync_directory(paths.done / leg / segment / fanout)
        carried += count
    return carried


def _commit_cancelled(spool: Spool) -> int:
    """Commits what is cancelled and nobody runs; registers nobody where nothing is cancelled."""
    if not list_names(spool.paths.cancel):
        return 0
    # Imported where it is used: it needs the worker and the harness.
    from hpcroll.api.cancellation import commit_cancelled

    return commit_cancelled(spool)
