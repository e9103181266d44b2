"""A published policy version, as the registry keeps it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hpcroll.contract.schema import Record
from hpcroll.contract.task import Name


class PolicyVersion(Record):
    """One version of a policy's weights; immutable once published."""

    SCHEMA: ClassVar[str] = "1.0"

    policy_name: Name
    lineage: Name
    """A trainer that restarts from an old checkpoint starts a new lineage."""
    version: int = Field(ge=0)
    weights: str | None = None
    """Where the weights lie, as the trainer names it."""
    weights_digest: str | None = None
    published_at: float = 0.0
    """Unix seconds on the publisher's node; for people, never compared."""

    def same_weights(self, other: PolicyVersion) -> bool:
        """Whether both name the same weights: by digest where both have one, else by where they lie."""
        if self.weights_digest is not None and other.weights_digest is not None:
            return self.weights_digest == other.weights_digest
        return self.weights == other.weights
