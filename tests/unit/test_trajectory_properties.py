"""What holds for every call graph, however odd: over agents that behave, and over calls made of noise."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract import (
    Call,
    CallPurpose,
    CallTokens,
    LogprobKind,
    PolicyId,
    RecordedCall,
    Sampling,
    Status,
    StopReason,
    Trajectory,
    TrajectoryRecord,
    Usage,
)
from hpcroll.testing.trajectories import random_calls, random_trajectory
from hpcroll.trajectory import Built, build, check

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
            purpose=draw(st.sampled_from([CallPurpose.MAIN, CallPurpose.MAIN, CallPurpose.AUXILIARY])),
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
def test_no_longer_segment_could_have_been_continued(calls: list[RecordedCall]) -> None:
    """A call that began a segment had no segment to continue, or repeats a prompt."""
    built = build(calls)
    seen: list[tuple[bool, list[int]]] = []
    strands: dict[int, list[int]] = {}
    by_index = {recorded.call.call_index: recorded for recorded in calls}
    for span in built.call_spans:
        recorded = by_index[span.call_index]
        auxiliary = recorded.call.purpose is CallPurpose.AUXILIARY
        prompt = recorded.tokens.prompt_ids.tolist()
        if span.segment_index not in strands and (auxiliary, prompt) not in seen:
            kin = [ids for index, ids in strands.items() if _auxiliary(built, by_index, index) == auxiliary]
            assert not any(prompt[: len(ids)] == ids for ids in kin)
        strands[span.segment_index] = prompt + recorded.tokens.sampled_ids.tolist()
        seen.append((auxiliary, prompt))


def _auxiliary(built: Built, by_index: dict[int, RecordedCall], segment: int) -> bool:
    first = next(span for span in built.call_spans if span.segment_index == segment)
    return by_index[first.call_index].call.purpose is CallPurpose.AUXILIARY


@seeded
@given(st.integers(0, 2**31))
def test_every_invariant_holds_over_imagined_agents(seed: int) -> None:
    assert check(random_trajectory(seed), random_calls(seed)) == ()
