"""Keeps pace with a running prime-rl trainer, by the files of its output directory."""

from __future__ import annotations

import logging
from pathlib import Path

from hpcroll.fs import list_names
from hpcroll.policy import PolicyRegistry

log = logging.getLogger(__name__)

FIRST_STEP = 1
"""prime-rl counts training steps from 1 and policy versions from 0: step N makes version N."""


def step_of(number: int) -> int:
    """The training step that part `number` is for."""
    return number + FIRST_STEP


class PrimeRlBridge:
    """Reads `broadcasts/step_<V>/STABLE`, which the trainer writes when version V can be served.

    The trainer removes old broadcasts, so that the newest version that was ever seen counts.
    """

    def __init__(self, out: Path, policy: PolicyRegistry, *, async_level: int, lineage: str) -> None:
        self._broadcasts = out / "broadcasts"
        self._policy = policy
        self._async_level = async_level
        self._lineage = lineage
        self._newest = self._published()

    @property
    def newest(self) -> int:
        """The newest version that was broadcast, -1 before the first."""
        return self._newest

    def may_go_on(self, number: int) -> bool:
        """Whether step N may be written: version N - 1 - `async_level` was broadcast.

        Publishes versions that are new in the run's registry, oldest first.
        """
        for version in self._stable():
            weights = str(self._folder(version).absolute())
            self._policy.publish(version, weights=weights, lineage=self._lineage)
            log.info("prime-rl broadcast policy version=%d weights=%s", version, weights)
            self._newest = version
        return self._newest >= step_of(number) - 1 - self._async_level

    def unread(self, number: int) -> bool:
        """Whether the trainer may still read the step: the version that it makes was not broadcast."""
        return step_of(number) > self._newest

    def _published(self) -> int:
        latest = self._policy.latest()
        if latest is None:
            return -1
        ours = (latest.policy_name, self._lineage)
        known = self._policy.versions()
        return max((e.version for e in known if (e.policy_name, e.lineage) == ours), default=-1)

    def _stable(self) -> list[int]:
        numbers = (name.removeprefix("step_") for name in list_names(self._broadcasts))
        versions = sorted(int(text) for text in numbers if text.isdecimal())
        return [v for v in versions if v > self._newest and self._is_stable(v)]

    def _is_stable(self, version: int) -> bool:
        try:
            with (self._folder(version) / "STABLE").open("rb"):
                return True
        except FileNotFoundError:
            return False

    def _folder(self, version: int) -> Path:
        return self._broadcasts / f"step_{version}"
