"""Staleness: how many policy versions lie between a rollout's oldest token and the newest publication."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from hpcroll.contract import require_major
from hpcroll.errors import ShardError
from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import Summary

_READABLE_MAJOR = 1
_REREAD_S = 0.2
"""Seconds for which the newest version is remembered: a backlog asks thousands of times a second."""


class _Newest(NamedTuple):
    """A publication, and where its lineage left another one: at version `left_at`, its own `base`."""

    lineage: str
    version: int
    parent: str | None = None
    left_at: int = 0
    base: int = 0

    def behind(self, summary: Summary, oldest: int) -> int | None:
        """How many versions it is ahead of the rollout's `oldest`; None where it does not go back to all of
        the rollout's versions."""
        if summary.lineage == self.lineage:
            return self.version - oldest
        if summary.lineage == self.parent and max(summary.version_high) <= self.left_at:
            return self.version - self.base + self.left_at - oldest
        return None


class Freshness:
    """Judges rollouts against what is published at that moment, so that time spent in queues counts."""

    def __init__(self, paths: RunPaths, max_lag: int | None) -> None:
        self._paths = paths
        self._max_lag = max_lag
        # By policy: when it was read, and its newest publication.
        self._read: dict[str, tuple[float, _Newest | None]] = {}

    def is_stale(self, summary: Summary) -> bool:
        """Whether the rollout's oldest token is more than `max_lag` versions old, or of another lineage than
        the newest one and what that was restarted from.

        Nothing is stale without a bound, or before anything was published.
        """
        if self._max_lag is None or (oldest := summary.oldest_version) is None:
            return False
        newest = self._newest(summary.policy_name)
        if newest is None:
            return False
        behind = newest.behind(summary, oldest)
        return behind is None or behind > self._max_lag

    def newest(self, policy_name: str) -> int | None:
        """The newest version of the policy, as of now; None where nothing is published."""
        newest = self._newest(policy_name)
        return None if newest is None else newest.version

    def _newest(self, policy_name: str) -> _Newest | None:
        now = time.monotonic()
        read_at, newest = self._read.get(policy_name, (-_REREAD_S, None))
        if now - read_at >= _REREAD_S:
            newest = self._read_newest(policy_name)
            self._read[policy_name] = (now, newest)
        return newest

    def _read_newest(self, policy_name: str) -> _Newest | None:
        path = self._paths.policy_latest(policy_name)
        data = read_fresh(path)
        if data is None:
            return None
        try:
            fields = json.loads(data)
            require_major(fields["schema_version"], _READABLE_MAJOR, path)
            lineage, version, parent = str(fields["lineage"]), int(fields["version"]), fields.get("parent")
            if parent is None:
                return _Newest(lineage, version)
            left, base = int(parent["version"]), int(fields["base"]["version"])
            return _Newest(lineage, version, str(parent["lineage"]), left, base)
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{path} is not a policy version: {error!r}") from error
