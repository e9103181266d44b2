"""Rows, tokens and forks are counted as a trainer meets them."""

from __future__ import annotations

import json

import pytest

from hpcroll.testing.trajectories import random_trajectory
from hpcroll.trajectory import RowStats, row_stats
from tests.call_graphs import imagine, trajectory_of


def test_a_session_that_goes_on_exactly_is_one_row() -> None:
    session = imagine(1, [("step", 0)] * 27)
    counts = row_stats(trajectory_of(session))
    assert (counts.calls, counts.call_rows, counts.merged_rows) == (30, 30, 1)
    assert counts.fewer_rows == 30
    assert counts.stored_tokens == counts.distinct_tokens == counts.merged_row_tokens
    assert counts.trained_tokens == counts.sampled_tokens
    assert counts.call_row_tokens > 10 * counts.merged_row_tokens
    assert counts.began == {"start": 1}


def test_forks_repeat_what_they_share_and_say_why_they_began() -> None:
    session = imagine(2, [("rerender", 0), ("retry", 0), ("title", 0), ("lose", 0)])
    trajectory = trajectory_of(session)
    counts = row_stats(trajectory)
    shared = sum(segment.parent.length for segment in trajectory.record.segments if segment.parent)
    assert shared > 0
    assert counts.stored_tokens == counts.distinct_tokens + shared
    assert counts.repetition == counts.stored_tokens / counts.distinct_tokens
    assert counts.began["context_rewritten"] == 1
    assert counts.began["retry"] >= 1
    assert counts.roles["auxiliary"] == 1
    assert counts.dropped_tokens > 0
    assert counts.merged_rows == 2


def test_counts_add_up_and_are_json() -> None:
    each = [row_stats(random_trajectory(seed)) for seed in range(20)]
    total = sum(each, RowStats())
    assert total.rollouts == 20
    assert total.call_rows == sum(counts.call_rows for counts in each)
    assert sum(total.began.values()) == total.segments == sum(total.roles.values())
    assert json.loads(json.dumps(total.to_dict()))["fewer_rows"] == pytest.approx(total.fewer_rows)
    assert RowStats().fewer_rows is None
