"""Token arrays, and the trajectory that they make with its record; free of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpcroll.contract.trajectory import TrajectoryRecord

Ids = NDArray[np.uint32]
Floats = NDArray[np.float32]
Flags = NDArray[np.uint8]


class LogprobKind(StrEnum):
    """Of which distribution a log-probability is."""

    SAMPLING = "sampling"
    """Of the very distribution the token was drawn from."""
    RAW = "raw"
    """Of the model's distribution at temperature 1, before penalties and truncation."""
    NONE = "none"
    """The engine returned none."""


@dataclass(frozen=True, slots=True)
class SegmentTokens:
    """Token arrays of one segment, all of shape (T,) and on the same axis: entry i is of token i.

    `ids` uint32; `sampled` uint8, 1 where a policy sampled the token; `loss_mask` uint8, what the
    configured view trains on, a subset of `sampled`; `logprobs` float32, finite where sampled, NaN
    elsewhere.
    """

    ids: Ids
    sampled: Flags
    loss_mask: Flags
    logprobs: Floats

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column with any number of values for each token: `counts` uint32 (T,), `values` (counts.sum(),)."""

    counts: NDArray[np.uint32]
    values: NDArray[Any]


ExtraColumn = tuple[NDArray[Any] | Ragged, ...]
"""One array of shape (T, ...) for each segment, or one `Ragged`."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A record and its token arrays, `tokens[i]` those of `record.segments[i]`.

    `extra_columns` are optional further columns by name: log-probabilities of a reference policy, routed
    experts, kept ids of top-p. Readers skip them unless asked.
    """

    record: TrajectoryRecord
    tokens: tuple[SegmentTokens, ...]
    extra_columns: Mapping[str, ExtraColumn] = field(default_factory=dict)

    @property
    def action_tokens(self) -> int:
        """How many tokens a policy sampled."""
        return sum(int(segment.sampled.sum()) for segment in self.tokens)
