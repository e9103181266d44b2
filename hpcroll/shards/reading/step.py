"""One optimiser step of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcroll.shards.reading.batches import Batch
from hpcroll.shards.reading.rows import GroupStats


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What became of groups since the trainer began, this step's included; `settled` is their sum.

    A group is counted once, under the first of these that applies.
    """

    delivered: int = 0
    zero_variance: int = 0
    """Left out since the rewards of their usable rollouts are all equal."""
    short: int = 0
    """Complete, but with too few usable rollouts."""
    stale: int = 0
    """Too few usable rollouts were left once those that lag too far behind were taken out."""
    incomplete: int = 0
    """The stream ended on them."""

    @property
    def settled(self) -> int:
        """Groups that are decided and will not come again."""
        return self.delivered + self.zero_variance + self.short + self.stale + self.incomplete


class Settle(Protocol):
    """Takes how many groups are settled, and how many of those were dropped; `run.policy.settle` is one."""

    def __call__(self, settled: int, /, *, dropped: int) -> object: ...


@dataclass(frozen=True, slots=True)
class StepVersions:
    """Policy versions: of the step's trained segments the lowest and the highest, and the newest published
    when the step was planned. None where there is none."""

    low: int | None
    high: int | None
    published: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """Step `number` (from 1) as one rank gets it; everything but `batches` is the same on every rank."""

    number: int
    batches: Sequence[Batch]
    """This rank's micro-batches, as many as every other rank has. Each is read when it is asked for, and
    read again the next time."""
    groups: tuple[GroupStats, ...]
    """The groups whose usable rollouts the step holds, each whole, over all ranks."""
    rollouts: int
    """How many rollouts the step has segments of, over all ranks."""
    trained_tokens: int
    """How many tokens the step trains on over all ranks."""
    counts: StepCounts
    versions: StepVersions

    @property
    def settled_groups(self) -> int:
        """How many groups are decided since the trainer began: what a window's `settle` takes."""
        return self.counts.settled
