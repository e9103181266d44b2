"""The gate: calls wait in a pause, are cut when it says so, and deadlines stand still meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hpcroll.gateway.admission import Admission, CallCutError
from hpcroll.policy import AdmissionState, Pause, PauseMode

OPEN = AdmissionState(generation=9)


def paused(
    *,
    drain_s: float = 60.0,
    max_s: float = 600.0,
    mode: PauseMode = PauseMode.CUT,
    serial: int = 1,
    name: str = "trainer",
) -> AdmissionState:
    pause = Pause(name=name, serial=serial, drain_s=drain_s, max_s=max_s, mode=mode)
    return AdmissionState(generation=serial, pauses=(pause,))


def run(scenario: Callable[[Admission], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(30):
            await scenario(Admission())

    asyncio.run(within())


async def one_call(gate: Admission, ended: asyncio.Event | None = None) -> str:
    try:
        async with gate.call():
            if ended is not None:
                await ended.wait()
    except CallCutError:
        return "cut"
    return "done"


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_calls_wait_for_the_end_of_a_pause_and_say_how_long() -> None:
    async def scenario(gate: Admission) -> None:
        gate.apply(paused())
        entered = asyncio.Event()

        async def waits() -> float:
            async with gate.call() as waited_s:
                entered.set()
                return waited_s

        call = asyncio.ensure_future(waits())
        await turns()
        assert not entered.is_set()
        assert gate.in_flight == 0
        gate.apply(OPEN)
        assert 0 < await call < 30
        async with gate.call() as waited_s:
            assert waited_s == 0.0
            assert gate.in_flight == 1
        assert gate.in_flight == 0

    run(scenario)


def test_calls_in_flight_may_finish_and_are_cut_after_the_drain() -> None:
    async def scenario(gate: Admission) -> None:
        quick, never = asyncio.Event(), asyncio.Event()
        first = asyncio.ensure_future(one_call(gate, quick))
        second = asyncio.ensure_future(one_call(gate, never))
        await turns()
        gate.apply(paused(drain_s=0.2))
        quick.set()
        assert await first == "done"
        assert not second.done()
        assert await second == "cut"
        assert gate.in_flight == 0
        assert not gate.is_open

    run(scenario)


def test_drain_of_no_time_cuts_at_once_and_a_kept_call_goes_on() -> None:
    async def scenario(gate: Admission) -> None:
        ended = asyncio.Event()
        kept = asyncio.ensure_future(one_call(gate, ended))
        await turns()
        gate.apply(paused(drain_s=0.0, mode=PauseMode.KEEP))
        await turns()
        assert not kept.done()
        gate.apply(paused(drain_s=0.0, serial=2))
        assert await kept == "cut"

    run(scenario)


def test_pause_that_is_lifted_in_time_cuts_nothing() -> None:
    async def scenario(gate: Admission) -> None:
        ended = asyncio.Event()
        call = asyncio.ensure_future(one_call(gate, ended))
        await turns()
        gate.apply(paused(drain_s=0.05))
        gate.apply(OPEN)
        await asyncio.sleep(0.1)
        ended.set()
        assert await call == "done"

    run(scenario)


def test_pause_ends_by_itself_and_the_same_one_does_not_begin_again() -> None:
    async def scenario(gate: Admission) -> None:
        gate.apply(paused(drain_s=0.0, max_s=0.05))
        assert gate.expired() == []
        assert await one_call(gate) == "done"
        assert [pause.name for pause in gate.expired()] == ["trainer"]
        gate.apply(paused(drain_s=0.0, max_s=0.05))
        assert gate.is_open, "its time is counted from when it was first seen"
        gate.apply(paused(drain_s=0.0, max_s=60.0, serial=2))
        assert not gate.is_open, "renewed"
        assert gate.expired() == []

    run(scenario)


def test_pauses_of_two_parties_add_up() -> None:
    async def scenario(gate: Admission) -> None:
        ours, theirs = paused().pauses[0], paused(name="operator", serial=2).pauses[0]
        gate.apply(AdmissionState(generation=2, pauses=(ours, theirs)))
        gate.apply(AdmissionState(generation=3, pauses=(theirs,)))
        assert not gate.is_open
        gate.apply(AdmissionState(generation=4))
        assert gate.is_open
        assert gate.generation == 4

    run(scenario)


def test_own_time_out_of_a_call_is_no_cut_and_does_not_run_while_it_waits() -> None:
    async def scenario(gate: Admission) -> None:
        async def call() -> str:
            async with gate.call(), asyncio.timeout(0.05):
                await asyncio.Event().wait()
            return "never"

        gate.apply(paused())
        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(0.15)
        assert not waiting.done()
        gate.apply(OPEN)
        with pytest.raises(TimeoutError):
            await waiting

    run(scenario)


def test_cancelled_call_is_cancelled_whether_it_waits_or_runs() -> None:
    async def scenario(gate: Admission) -> None:
        runs = asyncio.ensure_future(one_call(gate, asyncio.Event()))
        await turns()
        gate.apply(paused())
        waits = asyncio.ensure_future(one_call(gate))
        await turns()
        for task in (runs, waits):
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
        assert gate.in_flight == 0

    run(scenario)


def test_call_that_is_cut_leaves_nothing_pending_in_its_task() -> None:
    async def scenario(gate: Admission) -> None:
        async def cut_and_again() -> str:
            assert await one_call(gate, asyncio.Event()) == "cut"
            return await one_call(gate)

        task = asyncio.ensure_future(cut_and_again())
        await turns()
        gate.apply(paused(drain_s=0.0))
        await turns()
        gate.apply(OPEN)
        assert await task == "done"
        assert task.cancelling() == 0

    run(scenario)


def test_deadline_stands_still_in_a_pause() -> None:
    async def scenario(gate: Admission) -> None:
        loop = asyncio.get_running_loop()

        async def works() -> None:
            async with gate.deadline(0.2) as scope:
                await asyncio.sleep(0.05)
                gate.apply(paused())
                assert scope.when() is None
                await asyncio.sleep(0.4)
                gate.apply(OPEN)
                left_s = (scope.when() or 0.0) - loop.time()
                assert 0.0 < left_s <= 0.15
                await asyncio.Event().wait()

        began = loop.time()
        with pytest.raises(TimeoutError):
            await works()
        assert loop.time() - began >= 0.6

    run(scenario)


def test_deadline_that_begins_in_a_pause_starts_with_its_end() -> None:
    async def scenario(gate: Admission) -> None:
        gate.apply(paused())
        async with gate.deadline(60.0) as scope:
            assert scope.when() is None
            gate.apply(OPEN)
            assert (scope.when() or 0.0) - asyncio.get_running_loop().time() > 59
            gate.apply(paused(serial=2))
        gate.apply(OPEN)  # the one that is over is left alone

    run(scenario)


def test_open_gate_costs_no_turn_of_the_loop() -> None:
    async def scenario(gate: Admission) -> None:
        call = one_call(gate)
        with pytest.raises(StopIteration):
            call.send(None)

    run(scenario)
