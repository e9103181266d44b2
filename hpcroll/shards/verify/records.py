"""What must hold of one record, and of the two copies of a packed one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import ExtraColumn, Ragged, RolloutRef, Trajectory
from hpcroll.contract.invariants import check
from hpcroll.shards.format.run_facts import RunFacts

_LOWEST_HALF = np.float32(np.finfo(np.float16).min)


def broken_promises(
    facts: RunFacts, trajectory: Trajectory, *, ref: RolloutRef, attempt: int, incarnation: str
) -> Iterator[str]:
    """What a record breaks that stands where rollout `ref`, `attempt` and `incarnation` are named."""
    record = trajectory.record
    said = (record.rollout_id, record.attempt, record.incarnation)
    stands = (ref.rollout_id, attempt, incarnation)
    if said != stands:
        yield f"the record says {said}, its place says {stands}"
    if record.run_id != facts.run_id:
        yield f"the record is of run {record.run_id}, not {facts.run_id}"
    yield from check(trajectory, allow_shaped_logprobs=facts.allow_shaped_logprobs)


def differences(original: Trajectory, packed: Trajectory) -> Iterator[str]:
    """How a packed record differs from its level-0 original; log-probabilities may be halved."""
    if packed.record != original.record:
        yield "its record is not that of its level-0 original"
    if len(packed.tokens) != len(original.tokens):
        yield f"it has {len(packed.tokens)} token sequences, its level-0 original {len(original.tokens)}"
        return
    for index, (ours, theirs) in enumerate(zip(packed.tokens, original.tokens, strict=True)):
        for name in ("ids", "sampled", "loss_mask"):
            if not np.array_equal(getattr(ours, name), getattr(theirs, name)):
                yield f"segment {index}: {name} are not those of its level-0 original"
        halved = np.maximum(theirs.logprobs, _LOWEST_HALF).astype(np.float16).astype(np.float32)
        if not any(np.array_equal(ours.logprobs, like, equal_nan=True) for like in (theirs.logprobs, halved)):
            yield f"segment {index}: logprobs are not those of its level-0 original"
    if set(packed.extra_columns) != set(original.extra_columns):
        yield f"it has columns {sorted(packed.extra_columns)}, not {sorted(original.extra_columns)}"
        return
    for name, column in original.extra_columns.items():
        if not _same_column(column, packed.extra_columns[name]):
            yield f"column {name} is not that of its level-0 original"


def _same_column(one: ExtraColumn, other: ExtraColumn) -> bool:
    return len(one) == len(other) and all(map(_same_arrays, one, other))


def _same_arrays(one: NDArray[Any] | Ragged, other: NDArray[Any] | Ragged) -> bool:
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return np.array_equal(one.counts, other.counts) and _same_values(one.values, other.values)
    return not isinstance(one, Ragged) and not isinstance(other, Ragged) and _same_values(one, other)


def _same_values(one: NDArray[Any], other: NDArray[Any]) -> bool:
    # Bit for bit: NaN is a value here, and not every dtype has it.
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
