"""Drain: what may still be believed once a worker was told to stop."""

from __future__ import annotations

import asyncio
import time

from hpcroll.worker.drain import SETTLE_S, Drain


def test_an_ending_long_before_the_drain_is_believed_at_once() -> None:
    async def scenario() -> float:
        drain = Drain(grace_s=0)
        begun = time.monotonic()
        assert await drain.settle(since=begun - 2 * SETTLE_S)
        return time.monotonic() - begun

    assert asyncio.run(scenario()) < SETTLE_S / 2


def test_an_ending_just_before_a_signal_is_not_believed() -> None:
    async def scenario() -> bool:
        drain = Drain(grace_s=0)
        asyncio.get_running_loop().call_later(0.05, drain.ask, "SIGTERM")
        return await drain.settle(since=time.monotonic())

    assert asyncio.run(scenario()) is False


def test_an_ending_within_the_grace_of_a_drain_is_believed() -> None:
    async def scenario() -> tuple[bool, bool]:
        drain = Drain(grace_s=600)
        drain.ask("SIGUSR2")
        return drain.asked, await drain.settle(since=time.monotonic())

    assert asyncio.run(scenario()) == (True, True)


def test_sigterm_grants_no_grace() -> None:
    async def scenario() -> tuple[bool, bool, str]:
        drain = Drain(grace_s=600)
        drain.ask("SIGUSR2")
        before = drain.due
        drain.ask("SIGTERM", grace=False)
        return before, drain.due, drain.reason

    assert asyncio.run(scenario()) == (False, True, "SIGUSR2")


def test_grace_ends() -> None:
    async def scenario() -> bool:
        drain = Drain(grace_s=0.05)
        drain.ask("SIGUSR2")
        await asyncio.wait_for(drain.wait_due(), timeout=30)
        return drain.due

    assert asyncio.run(scenario())
