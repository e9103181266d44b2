"""What the loop prints: a row per step, and an account of where every group went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from hpcroll import Run, open_run
from tiny_grpo.layout import TRAINER, Layout, Settings

_HEADER = (
    ("step", 4), ("version", 7), ("lag min/mean/max", 16), ("submitted", 9), ("trained", 7), ("zero-var", 8),
    ("stale", 5), ("short", 5), ("open", 5), ("reward", 6), ("held-out", 8), ("tokens", 6), ("max ratio", 9),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One step; counts of groups are sums since the beginning.

    `trained`: delivered with something to learn from; `zero_variance`: delivered with equal rewards; `stale`,
    `short`: not delivered; `open`: none of these yet.
    """

    step: int
    lag: tuple[int, float, int]
    submitted: int
    trained: int
    zero_variance: int
    stale: int
    short: int
    open: int
    reward: float
    held_out: float
    tokens: int
    max_ratio: float
    groups: frozenset[str]

    def __str__(self) -> str:
        low, mean, high = self.lag
        groups = (self.submitted, self.trained, self.zero_variance, self.stale, self.short, self.open)
        rewards = (f"{self.reward:.3f}", f"{self.held_out:.3f}")
        lag = f"{low}/{mean:.2f}/{high}"
        return _line([self.step, self.step, lag, *groups, *rewards, self.tokens, f"{self.max_ratio:.2f}"])


def header() -> str:
    return _line([title for title, _ in _HEADER])


def make_row(said: dict[str, Any], before: Row | None, *, submitted: int, held_out: float) -> Row:
    """The row of what the trainer said of a step, and what it said before."""
    counts = said["counts"]
    zero_variance = said["zero_variance"] + (before.zero_variance if before else 0)
    return Row(
        step=said["step"],
        lag=tuple(said["lag"]),
        submitted=submitted,
        trained=counts["delivered"] - zero_variance,
        zero_variance=zero_variance,
        stale=counts["stale"],
        short=counts["short"],
        open=submitted - sum(counts.values()),
        reward=said["reward"],
        held_out=held_out,
        tokens=said["tokens"],
        max_ratio=said["max_ratio"],
        groups=frozenset(said["groups"]),
    )


def audit(layout: Layout, settings: Settings, run: Run, rows: Sequence[Row]) -> list[str]:
    """What is wrong with the account of a closed run's groups; nothing where each went to one place.

    What the trainer did not get to is read from its own position to the end of the stream: with what it
    trained on and what was dropped, these must be all groups that there are, none twice.
    """
    trained = [group for row in rows for group in row.groups]
    problems = [f"group {group} was trained on twice" for group in set(trained) if trained.count(group) > 1]
    reader = open_run(run.path).follow(trainer=TRAINER, max_lag=settings.max_lag)
    saved = torch.load(layout.checkpoint, weights_only=True)
    reader.load_state_dict(json.loads(saved["reader"]))
    rest = [
        group.group_id
        for step in reader.steps(groups=settings.groups_per_step, max_tokens=settings.max_tokens)
        for group in step.groups
    ]
    problems += [f"group {group} would come again" for group in set(rest) & set(trained)]
    begun = {group.group_id for group in open_run(run.path, columns=()).groups("any")}
    counts = reader.state_dict()["counts"]
    dropped = sum(counts.values()) - counts["delivered"]
    if len(begun) != len(trained) + len(rest) + dropped:
        problems.append(
            f"{len(begun)} groups were begun, but {len(trained)} trained on, {len(rest)} left over and "
            f"{dropped} dropped"
        )
    return problems


def gain(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean held-out reward of the first and of the last fifth of the steps."""
    fifth = max(len(rows) // 5, 1)
    return fmean(row.held_out for row in rows[:fifth]), fmean(row.held_out for row in rows[-fifth:])


def _line(cells: Sequence[object]) -> str:
    return "  ".join(f"{cell!s:>{width}}" for cell, (_, width) in zip(cells, _HEADER, strict=True))
