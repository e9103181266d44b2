"""Staleness: how many policy versions lie between a rollout's oldest token and the newest publication."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpcroll.errors import ShardError
from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import Summary

if TYPE_CHECKING:
    from hpcroll.contract.policy import PolicyVersion

_REREAD_S = 0.2
"""Seconds for which the newest version is remembered: a backlog asks thousands of times a second."""


class Freshness:
    """Judges rollouts against what is published at that moment, so that time spent in queues counts."""

    def __init__(self, paths: RunPaths, max_lag: int | None) -> None:
        self._paths = paths
        self._max_lag = max_lag
        self._read: dict[str, tuple[float, PolicyVersion | None]] = {}

    def is_stale(self, summary: Summary) -> bool:
        """Whether the rollout's oldest token is more than `max_lag` versions old, or of another lineage.

        Nothing is stale without a bound, or before anything was published.
        """
        oldest = summary.oldest_version
        if self._max_lag is None or oldest is None:
            return False
        newest = self._newest(summary.policy_name)
        if newest is None:
            return False
        return summary.lineage != newest.lineage or newest.version - oldest > self._max_lag

    def _newest(self, policy_name: str) -> PolicyVersion | None:
        now = time.monotonic()
        read_at, newest = self._read.get(policy_name, (-_REREAD_S, None))
        if now - read_at >= _REREAD_S:
            newest = self._read_newest(policy_name)
            self._read[policy_name] = (now, newest)
        return newest

    def _read_newest(self, policy_name: str) -> PolicyVersion | None:
        path = self._paths.policy_latest(policy_name)
        data = read_fresh(path)
        if data is None:
            return None
        from hpcroll.contract.policy import PolicyVersion  # a model: whoever sets no bound needs none

        try:
            return PolicyVersion.from_json(data)
        except ValueError as error:
            raise ShardError(f"{path} is not a policy version: {error}") from error
