"""Stage pools: who may claim when, and what counts against a deadline."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpcroll.config import StageConfig, StagesConfig
from hpcroll.contract import RolloutRef, Stage
from hpcroll.worker.pools import OVERDUE_GRACE_S, Flight, StagePools

ALL = (Stage.INIT, Stage.RUN, Stage.EVAL)


class _Events:
    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.written.append((event, fields["rollout"]))


def make_flight(ordinal: int) -> Flight:
    ref = RolloutRef(segment="0" * 16, ordinal=ordinal)
    return Flight(SimpleNamespace(rollout=SimpleNamespace(ref=ref), attempt=1))  # type: ignore[arg-type]


def due_at(when: float) -> asyncio.Timeout:
    return SimpleNamespace(when=lambda: when)  # type: ignore[return-value]


def make_pools(
    stages: tuple[Stage, ...] = ALL, *, init: int = 2, run: int = 2, ready: int = 1, overlap: bool = True
) -> StagePools:
    config = StagesConfig(
        init=StageConfig(width=init, timeout_s=60),
        run=StageConfig(width=run, timeout_s=60),
        eval=StageConfig(width=1, timeout_s=60),
        ready=ready,
        overlap=overlap,
    )
    return StagePools(config, stages, _Events())  # type: ignore[arg-type]


def place(
    pools: StagePools, ordinal: int, *, stage: Stage | None = None, waiting: Stage | None = None
) -> Flight:
    flight = make_flight(ordinal)
    pools.admit(flight)
    flight.stage, flight.waiting_for = stage, waiting
    return flight


def test_no_claim_beyond_the_init_pool() -> None:
    pools = make_pools(init=2, run=8)
    place(pools, 0, stage=Stage.INIT)
    assert pools.has_room()
    place(pools, 1, waiting=Stage.INIT)
    assert not pools.has_room()


def test_ready_sandboxes_are_bounded() -> None:
    pools = make_pools(init=4, run=2, ready=1)
    place(pools, 0, stage=Stage.RUN)
    place(pools, 1, stage=Stage.RUN)
    assert pools.has_room()  # one may be prepared ahead
    place(pools, 2, waiting=Stage.RUN)
    assert not pools.has_room()


def test_a_backlog_before_evaluation_stops_the_claims() -> None:
    pools = make_pools(run=8)
    for ordinal in range(2):
        assert pools.has_room()
        place(pools, ordinal, waiting=Stage.EVAL)
    assert not pools.has_room()


def test_one_at_a_time_where_stages_do_not_overlap() -> None:
    pools = make_pools(overlap=False)
    flight = place(pools, 0, stage=Stage.EVAL)
    assert not pools.has_room()
    flight.stage = None
    pools.end_stages(flight)  # it may still settle and commit; its stages are over
    assert pools.has_room()


def test_an_evaluation_leg_claims_what_it_can_evaluate() -> None:
    pools = make_pools((Stage.EVAL,))
    assert pools.has_room()
    place(pools, 0, stage=Stage.EVAL)
    assert not pools.has_room()


def test_time_in_a_queue_does_not_count_against_the_deadline() -> None:
    config = StagesConfig(run=StageConfig(width=1, timeout_s=0.4))
    pools = StagePools(config, ALL, _Events())  # type: ignore[arg-type]

    async def stay(flight: Flight) -> None:
        pools.admit(flight)
        async with pools.slot(Stage.RUN, flight):
            await asyncio.sleep(0.2)

    async def scenario() -> list[Flight]:
        flights = [make_flight(ordinal) for ordinal in range(5)]
        await asyncio.gather(*(stay(flight) for flight in flights))  # the last one waits 0.8 s
        return flights

    flights = asyncio.run(scenario())
    assert all(flight.timings[Stage.RUN].duration_s >= 0.2 for flight in flights)


def test_a_stage_past_its_deadline_raises() -> None:
    config = StagesConfig(run=StageConfig(width=1, timeout_s=0.05))
    pools = StagePools(config, ALL, _Events())  # type: ignore[arg-type]

    async def scenario() -> None:
        flight = make_flight(0)
        pools.admit(flight)
        async with pools.slot(Stage.RUN, flight):
            await asyncio.sleep(30)

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


def test_a_rollout_far_past_its_deadline_makes_its_worker_look_hung() -> None:
    pools = make_pools()
    flight = place(pools, 0, stage=Stage.RUN)
    flight.scope = due_at(time.monotonic())
    assert pools.overdue() == []
    flight.scope = due_at(time.monotonic() - OVERDUE_GRACE_S - 1)
    assert pools.overdue() == [flight]
