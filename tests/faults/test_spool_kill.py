"""SIGKILL, SIGSTOP and races: every rollout ends with exactly one committed result."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcroll.contract import EndReason
from hpcroll.spool import read_end
from tests.faults.spool_fleet import Fleet
from tests.spools import (
    ONE_LEG,
    TWO_LEGS,
    check_exactly_one_result,
    make_spool,
    read_records,
    submit,
    wait_until,
)


def test_racing_workers_claim_each_rollout_once(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, beat_s=0.5, silence_s=60.0)
    with Fleet(spool) as fleet:
        members = [fleet.start() for _ in range(5)]
        for member in members:
            assert member.id
        submit(spool, tasks=40, samples=3)
        fleet.wait_all_done()
        claims = [line for member in members for line in member.said("claim")]
    assert len(claims) == len(set(claims)) == 120
    assert all(line.endswith(" 1") for line in claims)
    assert check_exactly_one_result(spool).total() == 120


@pytest.mark.parametrize("legs", [ONE_LEG, TWO_LEGS], ids=["one leg", "two legs"])
def test_workers_killed_at_random_instants_lose_nothing(
    tmp_path: Path, legs: Sequence[Sequence[str]]
) -> None:
    chance = random.Random(20_261)
    # Kills are not to end a rollout here: their cap is out of reach.
    spool = make_spool(tmp_path, legs=legs, beat_s=0.1, silence_s=60.0, attempts={"kill": 1000})
    submit(spool, tasks=30, samples=3)
    with Fleet(spool) as fleet:
        victims = [fleet.start(leg=leg, work_s=0.02) for leg in spool.config.leg_names]
        for _ in range(6):
            index = chance.randrange(len(victims))
            victim, least, instant_s = victims[index], chance.randrange(1, 6), 0.02 * chance.random()
            wait_until(
                lambda v=victim, n=least: len(v.said("claim")) >= n or v.process.poll() is not None,
                "the victim has work in hand",
                poll_s=0.001,
            )
            victims[index] = fleet.start(leg=spool.config.leg_names[index], work_s=0.02)
            time.sleep(instant_s)  # not for anything to happen: any instant will do
            victim.kill(mark=True)
        fleet.wait_all_done()
    assert spool.exact_counts().attempts[spool.config.leg_names[0]] > 90, "some attempts were cut short"
    check_exactly_one_result(spool)


def test_silent_worker_is_taken_over_without_a_word_from_anyone(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, beat_s=0.1, silence_s=1.0, attempts={"kill": 1})
    ref = submit(spool, tasks=1, samples=1).refs[0]
    with Fleet(spool) as fleet:
        victim = fleet.start(stop_at="claimed")
        victim.wait_stopped()
        victim.kill(mark=False)
        fleet.start().wait_done()
    end = read_end(spool.paths.end_file(spool.config.leg_names[0], ref, 1))
    assert end is not None
    assert end.failure.reason is EndReason.SILENCE
    assert end.failure.incarnation == victim.id
    check_exactly_one_result(spool)


@pytest.mark.parametrize("point", ["claimed", "recorded", "checked"])
def test_paused_worker_that_wakes_after_its_lease_publishes_nothing(tmp_path: Path, point: str) -> None:
    spool = make_spool(tmp_path, beat_s=0.1, silence_s=1.0)
    ref = submit(spool, tasks=1, samples=1).refs[0]
    with Fleet(spool) as fleet:
        paused = fleet.start(stop_at=point)
        paused.wait_stopped()
        taker = fleet.start()
        taker.wait_done()
        paused.wake()
        paused.wait_done()
        assert paused.said("won") == []
        assert paused.said("lost") == [f"lost {ref}"]
        assert taker.said("won") == [f"won {ref}"]
        assert check_exactly_one_result(spool) == {taker.id: 1}
        # Its record is there, and no name confirms it.
        assert len(read_records(spool.paths, paused.id)) == 1


def test_paused_worker_that_wakes_before_anyone_commits_may_still_win(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, beat_s=0.1, silence_s=1.0)
    ref = submit(spool, tasks=1, samples=1).refs[0]
    with Fleet(spool) as fleet:
        paused = fleet.start(stop_at="checked")
        paused.wait_stopped()
        taker = fleet.start(stop_at="recorded")
        taker.wait_stopped()
        paused.wake()
        paused.wait_done()
        taker.wake()
        taker.wait_done()
        assert paused.said("won") == [f"won {ref}"]
        assert taker.said("won") == []
        assert check_exactly_one_result(spool) == {paused.id: 1}
