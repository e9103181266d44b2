"""Wishes are names: made, seen within a second, and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.contract import RolloutRef
from hpcroll.fs import RunPaths
from hpcroll.spool import Spool, Wishes
from hpcroll.spool.wishes import CACHE_S
from tests.spools import count_operations, make_spool, submit

SEGMENT, OTHER = "a" * 16, "b" * 16


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return make_spool(tmp_path).paths


def cancelled(wishes: Wishes, segment: str = SEGMENT, *, samples: int = 4) -> set[int]:
    refs = [RolloutRef(segment=segment, ordinal=n) for n in range(12)]
    return {ref.ordinal for ref in refs if wishes.cancels(ref, samples)}


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({}, set(range(12))),
        ({"segment": SEGMENT}, set(range(12))),
        ({"segment": SEGMENT, "group": 1}, {4, 5, 6, 7}),
        ({"segment": SEGMENT, "ordinal": 10}, {10}),
        ({"segment": OTHER}, set()),
    ],
)
def test_cancel_reaches_what_it_names(paths: RunPaths, wish: dict[str, object], expected: set[int]) -> None:
    wishes = Wishes(paths)
    assert cancelled(wishes) == set()
    wishes.cancel(**wish)  # type: ignore[arg-type]
    assert cancelled(wishes) == expected
    assert wishes.cancels_any_of(SEGMENT) == bool(expected)


def test_group_and_ordinal_are_not_mixed_up(paths: RunPaths) -> None:
    wishes = Wishes(paths)
    wishes.cancel(segment=SEGMENT, ordinal=1)
    assert cancelled(wishes) == {1}


def test_hold_and_drain_can_be_taken_back(paths: RunPaths) -> None:
    wishes = Wishes(paths)
    wishes.hold(SEGMENT)
    wishes.drain("worker-1")
    assert wishes.holds(SEGMENT)
    assert not wishes.holds(OTHER)
    assert wishes.draining("worker-1")
    assert not wishes.draining("worker-2")
    wishes.resume(SEGMENT)
    wishes.undrain("worker-1")
    assert not wishes.holds(SEGMENT)
    assert not wishes.draining("worker-1")
    wishes.hold()
    wishes.drain()
    assert wishes.holds(OTHER)
    assert wishes.draining("worker-2")


def test_close_stays(paths: RunPaths) -> None:
    wishes = Wishes(paths)
    assert not wishes.closed
    wishes.close()
    wishes.close()
    assert wishes.closed
    assert Wishes(paths).closed


def test_wish_of_another_process_is_seen_within_a_second(paths: RunPaths) -> None:
    now_s = 0.0
    wishes = Wishes(paths, clock=lambda: now_s)
    assert not wishes.draining("w")
    Wishes(paths).drain()
    assert not wishes.draining("w"), "answered from what was seen a moment ago"
    now_s += CACHE_S
    assert wishes.draining("w")


def test_asking_often_costs_one_listing_a_second(paths: RunPaths) -> None:
    now_s = 0.0
    wishes = Wishes(paths, clock=lambda: now_s)
    with count_operations(paths.root) as operations:
        for _ in range(1_000):
            wishes.draining("w")
            wishes.holds(SEGMENT)
            cancelled(wishes)
            _ = wishes.closed
    assert len(operations) == 4


def test_rollout_knows_its_group(tmp_path: Path) -> None:
    spool: Spool = make_spool(tmp_path)
    submission = submit(spool, tasks=3, samples=2)
    spool.wishes.cancel(segment=submission.segment.name, group=2)
    assert [spool.is_cancelled(ref) for ref in submission.refs] == [False] * 4 + [True] * 2
    assert spool.wishes.is_cancelled(spool.rollout(submission.refs[5]))
