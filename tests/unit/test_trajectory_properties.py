"""What holds for every call graph, however odd: over agents that behave, and over calls made of noise."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract import (
    Call,
    CallPurpose,
    CallSpan,
    CallTokens,
    LogprobKind,
    PolicyId,
    RecordedCall,
    Sampling,
    SegmentRole,
    SegmentStart,
    Status,
    StopReason,
    Trajectory,
    TrajectoryRecord,
    Usage,
)
from hpcroll.gateway import Journal, read_journal
from hpcroll.testing.trajectories import random_calls, random_trajectory
from hpcroll.trajectory import Built, build, check
from tests.call_graphs import MOVES, ROLLOUT, Session, imagine

seeded = settings(derandomize=True, deadline=None, max_examples=50)

few_ids = st.lists(st.integers(0, 2), max_size=8)
"""Three ids only, so that prompts share prefixes by accident all the time."""


@st.composite
def noise(draw: st.DrawFn) -> list[RecordedCall]:
    """Calls with random prompts, half of which go on from an earlier call."""
    calls: list[RecordedCall] = []
    for index in range(draw(st.integers(1, 10))):
        prompt = draw(few_ids)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls)).tokens
            prompt = [*earlier.prompt_ids.tolist(), *earlier.sampled_ids.tolist(), *prompt]
        sampled = draw(few_ids)
        broken = draw(st.sampled_from([False] * 5 + [True]))
        record = Call(
            call_index=index,
            rollout_id="0123456789abcdef/0",
            attempt=1,
            dialect="d",
            model_name="m",
            endpoint="",
            started_at=0.0,
            sampling_effective=draw(
                st.sampled_from([Sampling(temperature=1.0, top_p=1.0, top_k=-1), Sampling()])
            ),
            logprob_kind=draw(st.sampled_from([LogprobKind.RAW, LogprobKind.SAMPLING])),
            policy=PolicyId(policy_name="p", lineage="main", version_low=index, version_high=index + 1),
            purpose=draw(st.sampled_from([CallPurpose.MAIN, *CallPurpose])),
            error=draw(st.sampled_from([None, None, None, "cut off"])),
            usage=Usage(completion_counted=len(sampled)),
        )
        logprobs = np.full(len(sampled), np.nan if broken else -1.0, np.float32)
        tokens = CallTokens(np.array(prompt, np.uint32), np.array(sampled, np.uint32), logprobs)
        calls.append(RecordedCall(record, tokens))
    return calls


def as_trajectory(calls: list[RecordedCall], built: Built) -> Trajectory:
    trained = built.trained_tokens > 0
    record = TrajectoryRecord(
        run_id="run",
        rollout_id="0123456789abcdef/0",
        group_id="0123456789abcdef/g0",
        group_size=1,
        sample_index=0,
        task_id="t",
        task_sha256="",
        attempt=1,
        incarnation="w",
        handler="command",
        harness="h",
        harness_version="1",
        config_sha256="",
        status=Status.COMPLETED,
        stop_reason=StopReason.SUBMITTED,
        trainable=trained,
        not_trainable_because=() if trained else ("no token to train on",),
        segments=built.segments,
        calls=tuple(recorded.call for recorded in calls),
        call_spans=built.call_spans,
        dropped=built.dropped,
        gaps=built.gaps,
    )
    return Trajectory(record, built.tokens)


@seeded
@given(noise())
def test_every_invariant_holds_over_noise(calls: list[RecordedCall]) -> None:
    assert check(as_trajectory(calls, build(calls)), calls) == ()


@seeded
@given(noise())
def test_every_sampled_token_is_placed_or_dropped_once(calls: list[RecordedCall]) -> None:
    built = build(calls)
    placed = sum(int(tokens.sampled.sum()) for tokens in built.tokens)
    dropped = sum(drop.length for drop in built.dropped)
    assert placed + dropped == sum(len(recorded.tokens.sampled_ids) for recorded in calls)


@seeded
@given(noise())
def test_calls_of_one_segment_go_on_from_each_other_exactly(calls: list[RecordedCall]) -> None:
    built = build(calls)
    by_index = {recorded.call.call_index: recorded.tokens for recorded in calls}
    before: dict[int, CallSpan] = {}
    for span in built.call_spans:
        tokens, earlier = by_index[span.call_index], before.get(span.segment_index)
        if earlier is not None:
            base = by_index[earlier.call_index]
            whole = [*base.prompt_ids.tolist(), *base.sampled_ids.tolist()]
            assert tokens.prompt_ids[: len(whole)].tolist() == whole
        before[span.segment_index] = span


sessions = st.builds(
    imagine,
    st.integers(0, 2**31),
    st.lists(st.tuples(st.sampled_from(sorted(MOVES)), st.integers(0, 3)), max_size=12),
)


@settings(seeded, max_examples=150)
@given(sessions)
def test_each_call_lies_where_the_agent_made_it(session: Session) -> None:
    built = build(session.calls)
    spans = {span.call_index: span for span in built.call_spans}
    heads = {span.segment_index: span.call_index for span in reversed(built.call_spans)}
    dropped = {drop.call_index for drop in built.dropped}
    for index, truth in session.truths.items():
        if truth.dropped:
            assert index in dropped
            continue
        segment = built.segments[spans[index].segment_index]
        assert segment.role is truth.role, f"call {index}"
        span, cut = spans[index], session.calls[index].call.error is not None
        mask = built.tokens[segment.segment_index].loss_mask[span.start : span.start + span.length]
        trained = truth.role is SegmentRole.MAIN and truth.began is not SegmentStart.RETRY and not cut
        assert mask.tolist() == [trained] * len(mask), f"call {index}"
        if truth.after is not None:
            assert spans[truth.after].segment_index == segment.segment_index, f"call {index}"
            continue
        assert heads[segment.segment_index] == index
        if truth.source is None:
            assert segment.parent is None
            continue
        assert segment.began is truth.began, f"call {index}"
        assert segment.parent is not None
        assert segment.parent.length == truth.fork, f"call {index}"
        source = spans[truth.source]
        held = built.tokens[segment.parent.segment_index].ids[: truth.fork]
        assert np.array_equal(held, built.tokens[source.segment_index].ids[: truth.fork])


@seeded
@given(sessions)
def test_every_invariant_holds_over_sessions(session: Session) -> None:
    built = build(session.calls)
    assert check(as_trajectory(session.calls, built), session.calls) == ()
    assert sum(segment.weight for segment in built.segments) == pytest.approx(1.0)
    sampled = [token for recorded in session.calls for token in recorded.tokens.sampled_ids.tolist()]
    placed = [token for tokens in built.tokens for token in tokens.ids[tokens.sampled == 1].tolist()]
    left = sum(drop.length for drop in built.dropped)
    assert len(set(placed)) == len(placed) == len(sampled) - left
    assert set(placed) <= set(sampled)


@seeded
@given(sessions, st.randoms(use_true_random=False))
def test_order_in_which_calls_ended_does_not_matter(session: Session, random: Random) -> None:
    one, other = build(session.calls), build(random.sample(session.calls, len(session.calls)))
    assert one.segments == other.segments
    assert one.call_spans == other.call_spans
    assert [tokens.ids.tolist() for tokens in one.tokens] == [tokens.ids.tolist() for tokens in other.tokens]


@settings(seeded, max_examples=30)
@given(sessions, st.randoms(use_true_random=False), st.floats(0, 1))
def test_journal_cut_anywhere_gives_the_calls_before_the_cut(
    session: Session, random: Random, where: float
) -> None:
    # Calls end in another order than they began.
    ended = random.sample(session.calls, len(session.calls))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        folded = asyncio.run(_journal(path, ended))
        whole = list(read_journal(path, rollout_id=ROLLOUT, attempt=1))
        os.truncate(path, round(where * path.stat().st_size))
        left = list(read_journal(path, rollout_id=ROLLOUT, attempt=1))
    for read in (folded, whole):
        assert [recorded.call for recorded in read] == [recorded.call for recorded in ended]
        for ours, theirs in zip(read, ended, strict=True):
            assert np.array_equal(ours.tokens.prompt_ids, theirs.tokens.prompt_ids)
            assert np.array_equal(ours.tokens.sampled_ids, theirs.tokens.sampled_ids)
            assert np.array_equal(ours.tokens.logprobs, theirs.tokens.logprobs, equal_nan=True)
    plain, built = build(session.calls), build(whole)
    assert (plain.segments, plain.masked) == (built.segments, built.masked)
    for ours, theirs in zip(plain.tokens, built.tokens, strict=True):
        assert np.array_equal(ours.ids, theirs.ids)
    assert [recorded.call for recorded in left] == [recorded.call for recorded in ended[: len(left)]]
    assert check(as_trajectory(left, build(left)), left) == ()


async def _journal(path: Path, calls: list[RecordedCall]) -> list[RecordedCall]:
    """The calls as a session keeps them, written to a journal."""
    journal = Journal(path)
    journal.open()
    folded = [journal.fold(recorded) for recorded in calls]
    await asyncio.gather(*(journal.append(recorded) for recorded in folded))
    await journal.close()
    return folded


@seeded
@given(st.integers(0, 2**31))
def test_every_invariant_holds_over_imagined_agents(seed: int) -> None:
    assert check(random_trajectory(seed), random_calls(seed)) == ()
