"""The checker notices each way in which a record can break its promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpcroll.contract import (
    Dropped,
    LogprobKind,
    SegmentTokens,
    Trajectory,
    Verdict,
)
from hpcroll.testing.trajectories import random_calls, random_trajectory
from hpcroll.trajectory import check

SEED = next(s for s in range(100) if any(g.parent for g in random_trajectory(s).record.segments))
"""A trajectory with a fork."""


def with_tokens(trajectory: Trajectory, **change: Callable[[Any], Any]) -> Trajectory:
    """`trajectory` with columns of its first segment replaced."""
    first = trajectory.tokens[0]
    changed = replace(first, **{name: edit(getattr(first, name).copy()) for name, edit in change.items()})
    return Trajectory(trajectory.record, (changed, *trajectory.tokens[1:]))


def with_record(trajectory: Trajectory, **fields: Any) -> Trajectory:
    return Trajectory(trajectory.record.model_copy(update=fields), trajectory.tokens)


def with_segment(trajectory: Trajectory, index: int, **fields: Any) -> Trajectory:
    segments = list(trajectory.record.segments)
    segments[index] = segments[index].model_copy(update=fields)
    return with_record(trajectory, segments=tuple(segments))


def put(index: int | slice, value: Any) -> Callable[[Any], Any]:
    def edit(array: Any) -> Any:
        array[index] = value
        return array

    return edit


def first_sampled(trajectory: Trajectory) -> int:
    return int(np.flatnonzero(trajectory.tokens[0].sampled)[0])


def forked(trajectory: Trajectory) -> int:
    return next(g.segment_index for g in trajectory.record.segments if g.parent is not None)


def _double_span(t: Trajectory) -> Trajectory:
    return with_record(t, call_spans=(*t.record.call_spans, t.record.call_spans[0]))


def _shaped(t: Trajectory) -> Trajectory:
    index = next(s.call_index for s in t.record.call_spans if t.tokens[s.segment_index].loss_mask[s.start])
    calls = [
        c.model_copy(update={"logprob_kind": LogprobKind.NONE}) if c.call_index == index else c
        for c in t.record.calls
    ]
    return with_record(t, calls=tuple(calls))


def _with_run(t: Trajectory, **fields: Any) -> Trajectory:
    first, *rest = t.record.segments[0].policy_runs
    return with_segment(t, 0, policy_runs=(first.model_copy(update=fields), *rest))


def _parent_differs(t: Trajectory) -> Trajectory:
    tokens = list(t.tokens)
    child = tokens[forked(t)]
    tokens[forked(t)] = replace(child, ids=put(0, child.ids[0] + 1)(child.ids.copy()))
    return Trajectory(t.record, tuple(tokens))


BREAKS: dict[str, tuple[str, Callable[[Trajectory], Trajectory]]] = {
    "short column": ("1", lambda t: with_tokens(t, logprobs=lambda a: a[:-1])),
    "wrong dtype": ("1", lambda t: with_tokens(t, ids=lambda a: a.astype(np.int64))),
    "missing arrays": ("1", lambda t: Trajectory(t.record, t.tokens[1:])),
    "policy run lost": ("1", lambda t: with_segment(t, 0, policy_runs=t.record.segments[0].policy_runs[1:])),
    "policy run of another version": ("1", lambda t: _with_run(t, version_high=99)),
    "policy run of another policy": ("1", lambda t: _with_run(t, lineage="other")),
    "sampled without logprob": ("2", lambda t: with_tokens(t, logprobs=put(first_sampled(t), np.nan))),
    "infinite logprob": ("2", lambda t: with_tokens(t, logprobs=put(first_sampled(t), -np.inf))),
    "context with logprob": ("2", lambda t: with_tokens(t, logprobs=put(0, 0.0))),
    "trained context": ("2", lambda t: with_tokens(t, loss_mask=put(0, 1))),
    "flag of 2": ("2", lambda t: with_tokens(t, loss_mask=put(first_sampled(t), 2))),
    "span lost": ("3", lambda t: with_record(t, call_spans=t.record.call_spans[1:])),
    "span twice": ("3", _double_span),
    "placed and dropped": (
        "3",
        lambda t: with_record(
            t, dropped=(Dropped(call_index=t.record.call_spans[0].call_index, length=1, reason="x"),)
        ),
    ),
    "dropped without reason": (
        "3",
        lambda t: with_record(t, dropped=(Dropped(call_index=999, length=1, reason=""),)),
    ),
    "call unknown": ("3", lambda t: with_record(t, calls=t.record.calls[1:])),
    "fork differs from its parent": ("3", _parent_differs),
    "weights do not add up": ("5", lambda t: with_segment(t, 0, weight=7.0)),
    "valid reward absent": ("5", lambda t: with_record(t, reward=None, verdict=None)),
    "reward is not the verdict's": ("5", lambda t: with_record(t, verdict=Verdict(reward=0.25))),
    "not trainable without a reason": ("5", lambda t: with_record(t, trainable=False)),
    "shaped log-probabilities trained on": ("6", _shaped),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_invariant_is_named(name: str) -> None:
    number, break_it = BREAKS[name]
    sound = random_trajectory(SEED)
    assert check(sound, random_calls(SEED)) == ()
    problems = check(break_it(sound))
    assert any(problem.startswith(f"{number}: ") for problem in problems), problems


def test_context_that_is_not_the_prompt_is_noticed_against_the_journal() -> None:
    trajectory = with_tokens(random_trajectory(SEED), ids=put(0, 77))
    assert any(problem.startswith("4: ") for problem in check(trajectory, random_calls(SEED)))


def test_call_that_the_record_does_not_account_for_is_noticed_against_the_journal() -> None:
    calls, trajectory = random_calls(SEED), random_trajectory(SEED)
    extra = replace(calls[0], call=calls[0].call.model_copy(update={"call_index": 900}))
    assert any("neither placed nor dropped" in line for line in check(trajectory, [*calls, extra]))
    assert any("journal does not know" in line for line in check(trajectory, calls[1:]))


def test_config_may_opt_in_to_shaped_logprobs() -> None:
    broken = _shaped(random_trajectory(SEED))
    assert check(broken, allow_shaped_logprobs=True) == ()


def test_empty_trajectory_is_valid() -> None:
    sound = random_trajectory(SEED)
    fields: dict[str, Any] = {"segments": (), "call_spans": (), "calls": (), "dropped": ()}
    empty = Trajectory(sound.record.model_copy(update=fields), ())
    assert check(empty) == ()
    assert isinstance(sound.tokens[0], SegmentTokens)
