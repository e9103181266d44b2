"""What a segment of a rollout weighs."""

from __future__ import annotations

from collections.abc import Sequence


def shares(rollout_weight: float, trained: Sequence[int], sampled: Sequence[int]) -> tuple[float, ...]:
    """Each segment's part of `rollout_weight`; the parts add up to it.

    In proportion to trained tokens, so that each trained token of a rollout weighs the same however the
    rollout fell into segments; to sampled tokens where none is trained; equal where none was sampled.
    """
    for counts in (trained, sampled, [1] * len(trained)):
        total = sum(counts)
        if total > 0:
            return tuple(rollout_weight * count / total for count in counts)
    return ()
