"""Waiting for what another rank or node has made, and this one cannot see yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5
"""Seconds between two looks, growing."""


@dataclass(slots=True)
class Patience:
    """Sleeps between looks, longer and longer, for `timeout_s` in all since the last sign of life.

    `sign` tells of whoever is waited for: each time that what it returns has changed, the time begins anew.
    """

    timeout_s: float
    sign: Callable[[], object] = lambda: None
    _look_s: float = _FIRST_LOOK_S
    _since: float = field(default_factory=time.monotonic)
    _seen: object = None

    def wait(self) -> bool:
        """Sleeps until the next look; False where the time is over."""
        seen = self.sign()
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        left_s = self._since + self.timeout_s - now
        if left_s <= 0:
            return False
        time.sleep(min(self._look_s, left_s))
        self._look_s = min(self._look_s * 1.5, _LONGEST_LOOK_S)
        return True
