"""A published policy version, as the registry keeps it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hpcroll.contract.schema import Frozen, Record
from hpcroll.contract.task import Name


class Branch(Frozen):
    """Where a lineage left another one."""

    lineage: Name
    version: int = Field(ge=0)


class LineageBase(Frozen):
    """Where a lineage begins, for what is counted from there on."""

    version: int = Field(default=0, ge=0)
    settled: int = Field(default=0, ge=0)
    """Groups that the trainer had settled by then."""
    dropped: int = Field(default=0, ge=0)
    """How many of those it had not trained on."""


class PolicyVersion(Record):
    """One version of a policy's weights; immutable once published."""

    SCHEMA: ClassVar[str] = "1.1"

    policy_name: Name
    lineage: Name
    """A trainer that restarts from an old checkpoint starts a new lineage."""
    version: int = Field(ge=0)
    weights: str | None = None
    """Where the weights lie, as the trainer names it."""
    weights_digest: str | None = None
    published_at: float = 0.0
    """Unix seconds on the publisher's node; for people, never compared."""
    parent: Branch | None = None
    """Where its lineage left another one; None for one that did not."""
    base: LineageBase = LineageBase()
    """Where its lineage begins."""

    def same_weights(self, other: PolicyVersion) -> bool:
        """Whether both name the same weights: by digest where both have one, else by where they lie."""
        if self.weights_digest is not None and other.weights_digest is not None:
            return self.weights_digest == other.weights_digest
        return self.weights == other.weights
