"""The name of a rollout; free of models, since readers build thousands a second."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SEGMENT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class RolloutRef:
    """Names one rollout of a run: the n-th of a manifest segment.

    Raises `ValueError` unless `segment` is 16 hexadecimal digits and `ordinal` fits 32 bits.
    """

    segment: str
    ordinal: int

    def __post_init__(self) -> None:
        if not _SEGMENT.fullmatch(self.segment) or not 0 <= self.ordinal < 1 << 32:
            raise ValueError(
                f"{self.segment}/{self.ordinal} names no rollout: a segment is 16 hexadecimal digits, an "
                "ordinal less than 2**32"
            )

    @property
    def rollout_id(self) -> str:
        """`<segment>/<ordinal>`, unique within the run."""
        return f"{self.segment}/{self.ordinal}"

    @classmethod
    def parse(cls, rollout_id: str) -> RolloutRef:
        """The inverse of `rollout_id`; raises `ValueError` for anything else."""
        segment, slash, ordinal = rollout_id.partition("/")
        if not slash or not ordinal.isdecimal():
            raise ValueError(f"{rollout_id!r} is not a rollout id: expected SEGMENT/ORDINAL")
        return cls(segment=segment, ordinal=int(ordinal))

    def __str__(self) -> str:
        return self.rollout_id


def group_id(ref: RolloutRef, group_size: int) -> str:
    """The group of rollout `ref`, in a segment with `group_size` samples of each task."""
    return f"{ref.segment}/g{ref.ordinal // group_size}"
