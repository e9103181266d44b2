"""Why a worker has nothing to do, and how long it puts up with that."""

from __future__ import annotations

from dataclasses import dataclass

from hpcroll.config import LaunchConfig
from hpcroll.spool import Claims


@dataclass(frozen=True, slots=True)
class Idleness:
    """What a worker without work waits for, in seconds at most."""

    patience_s: float
    because: str | None = None
    """Why it ends then; None where nothing is left."""


def idleness(claims: Claims, launch: LaunchConfig, *, more: bool) -> Idleness | None:
    """After a look that found nothing to claim; None where there may soon be something again.

    `more`: somebody said that further groups will be submitted.
    """
    if claims.finished():
        if not more:
            return Idleness(launch.idle_s)
        patience_s = max(launch.idle_s, launch.window_wait_s)
        return Idleness(patience_s, f"nothing further was submitted for {patience_s:g} s")
    if claims.waits_for_limit:
        because = f"the window let nothing start for {launch.window_wait_s:g} s"
        return Idleness(launch.window_wait_s, because)
    return None
