"""Draining: how a worker learns that it must stop, and why no result slips out while it does.

Slurm sends its signals to every process of a step, so that payloads and sandboxes may die of the same
SIGTERM that the worker gets, and a little earlier. Every ending of a rollout therefore *settles*: it
waits a moment, and where a drain began in it, the ending is not believed but the rollout released.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

SETTLE_S = 1.0
"""Longest time between a step-wide signal's first and last delivery that is allowed for."""


class Drain:
    """The worker's wish to stop; `grace_s` is what rollouts in flight may still take."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = asyncio.Event()
        self._now = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self.reason = ""

    @property
    def asked(self) -> bool:
        """True from the moment at which nothing new may be claimed."""
        return self._asked.is_set()

    @property
    def due(self) -> bool:
        """True from the moment at which rollouts in flight are released."""
        return self._now.is_set()

    def listen(self) -> None:
        """Drains on SIGTERM and SIGINT at once, on SIGUSR2 with grace (Slurm's time-limit warning)."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self.ask("SIGTERM", grace=False))
        loop.add_signal_handler(signal.SIGINT, lambda: self.ask("SIGINT", grace=False))
        loop.add_signal_handler(signal.SIGUSR2, lambda: self.ask("SIGUSR2"))

    def ask(self, reason: str, *, grace: bool = True) -> None:
        """Begins the drain; without `grace`, or where there is none, it is due at once."""
        if not self.asked:
            self.reason = reason
        self._asked.set()
        if not grace or self._grace_s == 0:
            self._now.set()
        elif self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(self._grace_s, self._now.set)

    async def wait_asked(self, timeout_s: float) -> bool:
        """Waits until a drain is asked for, at most `timeout_s`; whether it was."""
        return await _wait(self._asked, timeout_s)

    async def wait_due(self) -> None:
        """Waits until rollouts in flight have to be released."""
        await self._now.wait()

    async def settle(self, since: float) -> bool:
        """Whether an ending that came at monotonic time `since` may be believed."""
        left_s = since + SETTLE_S - time.monotonic()
        if left_s > 0 and not self.due:
            await _wait(self._now, left_s)
        return not self.due


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
