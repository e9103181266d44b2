"""Staleness: how many policy versions lie between a rollout's oldest token and the newest publication."""

from __future__ import annotations

import json
import time

from hpcroll.contract import require_major
from hpcroll.errors import ShardError
from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import Summary

_READABLE_MAJOR = 1
_REREAD_S = 0.2
"""Seconds for which the newest version is remembered: a backlog asks thousands of times a second."""


class Freshness:
    """Judges rollouts against what is published at that moment, so that time spent in queues counts."""

    def __init__(self, paths: RunPaths, max_lag: int | None) -> None:
        self._paths = paths
        self._max_lag = max_lag
        # By policy: when it was read, and its newest lineage and version.
        self._read: dict[str, tuple[float, tuple[str, int] | None]] = {}

    def is_stale(self, summary: Summary) -> bool:
        """Whether the rollout's oldest token is more than `max_lag` versions old, or of another lineage.

        Nothing is stale without a bound, or before anything was published.
        """
        if self._max_lag is None or (oldest := summary.oldest_version) is None:
            return False
        newest = self._newest(summary.policy_name)
        if newest is None:
            return False
        lineage, version = newest
        return summary.lineage != lineage or version - oldest > self._max_lag

    def newest(self, policy_name: str) -> int | None:
        """The newest version of the policy, as of now; None where nothing is published."""
        newest = self._newest(policy_name)
        return None if newest is None else newest[1]

    def _newest(self, policy_name: str) -> tuple[str, int] | None:
        now = time.monotonic()
        read_at, newest = self._read.get(policy_name, (-_REREAD_S, None))
        if now - read_at >= _REREAD_S:
            newest = self._read_newest(policy_name)
            self._read[policy_name] = (now, newest)
        return newest

    def _read_newest(self, policy_name: str) -> tuple[str, int] | None:
        path = self._paths.policy_latest(policy_name)
        data = read_fresh(path)
        if data is None:
            return None
        try:
            fields = json.loads(data)
            require_major(fields["schema_version"], _READABLE_MAJOR, path)
            return str(fields["lineage"]), int(fields["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{path} is not a policy version: {error!r}") from error
