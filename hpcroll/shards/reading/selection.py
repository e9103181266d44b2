"""What of a run a reader is asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from hpcroll.contract import Status
from hpcroll.errors import ConfigError
from hpcroll.shards.format.codec import Summary
from hpcroll.shards.format.stored import ALL_COLUMNS, Column


@dataclass(frozen=True, slots=True)
class Selection:
    """Columns to read and rollouts to deliver; a bound that is None lets everything pass."""

    columns: frozenset[Column] = ALL_COLUMNS
    trainable: bool | None = None
    status: frozenset[Status] | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    policy: frozenset[str] | None = None
    """Names of policies."""
    min_version: int | None = None
    max_version: int | None = None
    trust_marks: bool = False
    """Take a mark for the `done` name it stands for, which saves one open per rollout."""

    @classmethod
    def of(
        cls,
        *,
        columns: Collection[str] | None,
        trainable: bool | None,
        status: Collection[str] | str | None,
        min_reward: float | None,
        max_reward: float | None,
        policy: Collection[str] | str | None,
        min_version: int | None,
        max_version: int | None,
        trust_marks: bool,
    ) -> Self:
        """A selection from what a user wrote; raises `ConfigError`, which lists the choices."""
        wanted = [status] if isinstance(status, str) else status
        try:
            chosen = ALL_COLUMNS if columns is None else frozenset(Column(name) for name in columns)
            states = None if wanted is None else frozenset(Status(name) for name in wanted)
        except ValueError as error:
            raise ConfigError(
                f"{error}; columns are {', '.join(Column)}, statuses are {', '.join(Status)}"
            ) from error
        if Column.TEXT in chosen:
            chosen |= {Column.RECORD}
        names = None if policy is None else frozenset([policy] if isinstance(policy, str) else policy)
        return cls(
            columns=chosen,
            trainable=trainable,
            status=states,
            min_reward=min_reward,
            max_reward=max_reward,
            policy=names,
            min_version=min_version,
            max_version=max_version,
            trust_marks=trust_marks,
        )

    def to_json(self) -> dict[str, Any]:
        """What decides which rollouts are delivered, as JSON."""
        return {
            "trainable": self.trainable,
            "status": None if self.status is None else sorted(self.status),
            "min_reward": self.min_reward,
            "max_reward": self.max_reward,
            "policy": None if self.policy is None else sorted(self.policy),
            "min_version": self.min_version,
            "max_version": self.max_version,
        }

    def accepts(self, summary: Summary) -> bool:
        """Whether a rollout is delivered; one without a reward passes no bound on it,
        one without sampled tokens none on versions."""
        if self.trainable is not None and summary.trainable != self.trainable:
            return False
        if self.status is not None and summary.status not in self.status:
            return False
        if self.policy is not None and summary.policy_name not in self.policy:
            return False
        if not self._accepts_versions(summary):
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        reward = summary.reward
        return (
            reward is not None
            and (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
        )

    def _accepts_versions(self, summary: Summary) -> bool:
        if self.min_version is None and self.max_version is None:
            return True
        sampled = [version for version in summary.version_low if version >= 0]
        return bool(sampled) and (
            (self.min_version is None or min(sampled) >= self.min_version)
            and (self.max_version is None or max(summary.version_high) <= self.max_version)
        )
