"""Packing while a run goes on, until it is closed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpcroll.fs.atomic import read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.level1.packer import Packer, PackReport
from hpcroll.shards.level1.retention import RetainReport, Retention

_STEP_S = 0.1
"""Seconds between two questions whether to stop."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did; `retained` is None where nothing is deleted."""

    packed: PackReport
    retained: RetainReport | None


def follow_packing(
    paths: RunPaths,
    packer: Packer,
    *,
    retention: Retention | None = None,
    poll_s: float = 10.0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Round]:
    """Packs what can be packed every `poll_s` seconds; with `retention` deletes what may go. A round each.

    Ends when `stop()` is true, or after the round that follows the run's closing.
    """
    while True:
        # Asked before the round: it then takes whatever was committed before the run was closed.
        closed = read_fresh(paths.closed) is not None
        packed = packer.pack()
        yield Round(packed, retention.retain() if retention is not None else None)
        if closed or stop():
            return
        # Who lost a race steps back, so that two packers do not do everything twice.
        pause_s = poll_s * (random.uniform(3.0, 9.0) if packed.thrown_away else 1.0)
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0 and not stop():
            time.sleep(min(_STEP_S, left_s))
