"""Calls become segments: what continues, what forks, what stands apart, and nothing is lost silently."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hpcroll.contract import (
    Call,
    CallPurpose,
    CallTokens,
    LogprobKind,
    Parent,
    PolicyId,
    RecordedCall,
    Sampling,
    SegmentRole,
    SegmentStart,
    SpanRole,
    Usage,
    VersionSpan,
)
from hpcroll.testing.trajectories import random_calls
from hpcroll.trajectory import Built, build

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
WARM = Sampling(temperature=0.7, top_p=1.0, top_k=-1)
POLICY = PolicyId(policy_name="policy", lineage="main", version_low=3, version_high=3)


def call(index: int, prompt: list[int], sampled: list[int], **fields: Any) -> RecordedCall:
    logprobs = fields.pop("logprobs", [-0.5] * len(sampled))
    values: dict[str, Any] = {
        "call_index": index,
        "rollout_id": "0123456789abcdef/0",
        "attempt": 1,
        "dialect": "openai_chat",
        "model_name": "policy",
        "endpoint": "",
        "started_at": 0.0,
        "logprob_kind": LogprobKind.RAW,
        "sampling_effective": PLAIN,
        "finish_reason": "stop",
        "policy": POLICY,
        "usage": Usage(prompt_counted=len(prompt), completion_counted=len(sampled)),
    }
    tokens = CallTokens(
        np.array(prompt, np.uint32), np.array(sampled, np.uint32), np.array(logprobs, np.float32)
    )
    return RecordedCall(Call(**{**values, **fields}), tokens)


def ids(built: Built) -> list[list[int]]:
    return [tokens.ids.tolist() for tokens in built.tokens]


def test_exact_continuation_is_one_segment() -> None:
    built = build([call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 3, 4, 5, 6], [7])])
    assert ids(built) == [[1, 2, 3, 4, 5, 6, 7]]
    assert built.tokens[0].sampled.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert built.tokens[0].loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert np.isnan(built.tokens[0].logprobs).tolist() == [True, True, True, False, False, True, False]
    assert [(span.start, span.length) for span in built.call_spans] == [(3, 2), (6, 1)]
    assert [(run.start, run.length, run.version_low) for run in built.segments[0].policy_runs] == [
        (3, 2, 3),
        (6, 1, 3),
    ]
    assert built.segments[0].began is SegmentStart.START
    assert built.segments[0].ended == "stop"
    assert not built.dropped
    assert not built.gaps
    assert not built.masked


def test_longest_segment_that_is_a_prefix_is_continued() -> None:
    # Both [1 2 3] (after call 0) and [1 2 3 4 5] (after its retry) are prefixes of call 2's prompt.
    built = build([call(0, [1, 2], [3]), call(1, [1, 2], [3, 4, 5]), call(2, [1, 2, 3, 4, 5, 6], [7])])
    assert ids(built) == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3]]
    assert built.segments[1].parent == Parent(segment_index=0, length=2)


def test_rerendered_reply_forks_at_the_deepest_exact_common_point() -> None:
    built = build([call(0, [1, 2, 3], [4, 5, 6]), call(1, [1, 2, 3, 4, 9, 6, 10], [11])])
    assert ids(built) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 6, 10, 11]]
    fork = built.segments[1]
    assert fork.began is SegmentStart.CONTEXT_REWRITTEN
    assert fork.parent == Parent(segment_index=0, length=4)
    assert fork.role is SegmentRole.MAIN
    assert built.segments[0].ended == SegmentStart.CONTEXT_REWRITTEN
    # The token that both share was sampled once: in the fork it is context, in the assistant's words.
    assert built.tokens[1].sampled.tolist() == [0] * 7 + [1]
    assert [(span.start, span.length, span.role) for span in fork.context_spans] == [
        (0, 3, SpanRole.UNKNOWN),
        (3, 1, SpanRole.ASSISTANT),
        (4, 3, SpanRole.UNKNOWN),
    ]


def test_fork_chooses_the_deepest_of_several_segments() -> None:
    built = build(
        [
            call(0, [1, 2, 3], [4, 5]),
            call(1, [1, 2, 3, 4, 9], [6, 7]),
            call(2, [1, 2, 3, 4, 9, 6, 8], [10]),
        ]
    )
    assert [segment.parent for segment in built.segments] == [
        None,
        Parent(segment_index=0, length=4),
        Parent(segment_index=1, length=6),
    ]


def test_compacted_history_stays_with_its_line() -> None:
    system = list(range(100, 130))
    built = build(
        [
            call(0, [*system, 1, 2, 3], [4]),
            call(1, [*system, 1, 2, 3, 4, 5], [6]),
            call(2, [*system, 77, 78], [8]),
        ]
    )
    assert built.segments[1].began is SegmentStart.CONTEXT_REWRITTEN
    assert built.segments[1].parent == Parent(segment_index=0, length=30)


def test_same_prompt_twice_gives_siblings_and_the_unused_one_is_not_trained_on() -> None:
    built = build([call(0, [1, 2], [3]), call(1, [1, 2], [4]), call(2, [1, 2, 3, 5], [6])])
    assert ids(built) == [[1, 2, 3, 5, 6], [1, 2, 4]]
    assert built.segments[1].began is SegmentStart.RETRY
    assert built.segments[1].parent == Parent(segment_index=0, length=2)
    assert built.segments[1].ended == SegmentStart.RETRY
    assert built.tokens[1].sampled.tolist() == [0, 0, 1]
    assert built.tokens[1].loss_mask.tolist() == [0, 0, 0]
    assert built.tokens[0].loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert len(built.masked) == 1
    assert "retry" in built.masked[0]


def test_last_of_equal_prompts_is_used_where_no_later_context_tells() -> None:
    built = build([call(0, [1, 2], [3]), call(1, [1, 2], [4])])
    assert ids(built) == [[1, 2, 4], [1, 2, 3]]
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [1, 0]


def test_sample_that_a_rewritten_context_builds_on_is_used() -> None:
    built = build([call(0, [1, 2], [3, 4]), call(1, [1, 2], [5]), call(2, [1, 2, 3, 9], [6])])
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [2, 0, 1]


def test_unrelated_single_call_is_auxiliary_and_unrelated_dialogue_is_subagent() -> None:
    built = build(
        [
            call(0, [1, 2, 3], [4]),
            call(1, [50, 51, 52], [53]),
            call(2, [1, 2, 3, 4, 5], [6]),
            call(3, [60, 61], [62]),
            call(4, [60, 61, 62, 63], [64]),
            call(5, [1, 2, 3, 4, 5, 6, 7], [8]),
        ]
    )
    assert [segment.role for segment in built.segments] == [
        SegmentRole.MAIN,
        SegmentRole.AUXILIARY,
        SegmentRole.SUBAGENT,
    ]
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [3, 0, 0]
    assert [segment.weight for segment in built.segments] == [1.0, 0.0, 0.0]
    assert [segment.parent for segment in built.segments] == [None, None, None]


def test_title_asked_before_the_work_does_not_become_the_main_line() -> None:
    built = build([call(0, [50, 51], [52]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4, 5], [6])])
    assert [(segment.role, segment.began) for segment in built.segments] == [
        (SegmentRole.AUXILIARY, SegmentStart.START),
        (SegmentRole.MAIN, SegmentStart.START),
    ]


def test_subagent_that_does_most_of_the_work_does_not_become_the_main_line() -> None:
    subagent = [60, 61]
    calls = [call(0, [50, 51], [52]), call(1, [1, 2, 3], [4])]
    for index in range(2, 8):
        calls.append(call(index, subagent, [100 + index]))
        subagent = [*subagent, 100 + index, 200 + index]
    calls.append(call(8, [1, 2, 3, 4, 5], [6]))
    assert [segment.role for segment in build(calls).segments] == [
        SegmentRole.AUXILIARY,
        SegmentRole.MAIN,
        SegmentRole.SUBAGENT,
    ]


def test_dialogue_that_begins_when_the_main_one_is_over_is_the_agents_own() -> None:
    # A history compacted to little more than a short system prompt, or an agent of several acts.
    built = build(
        [
            call(0, [9, *range(100, 140)], [1]),
            call(1, [9, *range(100, 140), 1, 2], [3]),
            call(2, [9, *range(200, 220)], [4]),
            call(3, [9, *range(200, 220), 4, 5], [6]),
        ]
    )
    assert [segment.role for segment in built.segments] == [SegmentRole.MAIN] * 2
    assert built.trained_tokens == 4


def test_retried_title_does_not_become_the_main_line() -> None:
    built = build(
        [call(0, [50], [52]), call(1, [50], [53]), call(2, [1, 2], [3]), call(3, [1, 2, 3, 4], [5])]
    )
    assert [segment.role for segment in built.segments] == [
        SegmentRole.AUXILIARY,
        SegmentRole.AUXILIARY,
        SegmentRole.MAIN,
    ]


def test_longest_line_is_main_where_every_call_stands_alone() -> None:
    built = build([call(0, [50], [52]), call(1, [1, 2, 3], [4, 5])])
    assert [segment.role for segment in built.segments] == [SegmentRole.AUXILIARY, SegmentRole.MAIN]


def test_declared_auxiliary_call_never_lengthens_the_main_line() -> None:
    built = build(
        [
            call(0, [1, 2, 3], [4]),
            call(1, [1, 2, 3, 4, 90], [91], purpose=CallPurpose.AUXILIARY),
            call(2, [1, 2, 3, 4, 5], [6]),
        ]
    )
    assert ids(built) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 90, 91]]
    assert built.segments[1].role is SegmentRole.AUXILIARY
    assert built.tokens[1].loss_mask.sum() == 0


def test_two_agents_that_share_a_template_opening_stay_apart() -> None:
    header = [900, 901, 902]
    built = build(
        [
            call(0, [*header, *range(20)], [70]),
            call(1, [*header, *range(40, 60)], [71]),
            call(2, [*header, *range(20), 70, 80], [72]),
        ]
    )
    assert [segment.parent for segment in built.segments] == [None, None]


@pytest.mark.parametrize(
    ("kind", "sampling", "trained"),
    [
        (LogprobKind.RAW, PLAIN, True),
        (LogprobKind.RAW, WARM, False),
        (LogprobKind.RAW, Sampling(), False),
        (LogprobKind.SAMPLING, WARM, True),
    ],
)
def test_only_logprobs_of_the_sampling_distribution_are_trained_on(
    kind: LogprobKind, sampling: Sampling, trained: bool
) -> None:
    calls = [call(0, [1], [2, 3], logprob_kind=kind, sampling_effective=sampling)]
    assert build(calls).trained_tokens == (2 if trained else 0)
    assert bool(build(calls).masked) is not trained
    assert build(calls, train_on_shaped_logprobs=True).trained_tokens == 2
    assert build(calls).tokens[0].sampled.sum() == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logprobs": [-1.0, float("nan")]}, "1 of 2 sampled ids have no finite log-probability"),
        ({"logprobs": [-1.0]}, "1 log-probabilities came for 2 sampled ids"),
        ({"policy": None}, "no policy version was published"),
    ],
)
def test_samples_that_cannot_stand_in_a_segment_are_dropped_with_the_reason(
    fields: dict[str, Any], reason: str
) -> None:
    built = build([call(0, [1, 2], [3, 4], **fields), call(1, [1, 2, 3, 4, 5], [6])])
    assert [(drop.call_index, drop.length) for drop in built.dropped] == [(0, 2)]
    assert reason in built.dropped[0].reason
    assert any(reason in line for line in built.masked)
    assert ids(built) == [[1, 2, 3, 4, 5, 6]]
    assert built.tokens[0].sampled.tolist() == [0, 0, 0, 0, 0, 1]


def test_samples_without_prompt_ids_are_dropped() -> None:
    built = build([call(0, [], [3], error="broke off")])
    assert built.segments == ()
    assert (
        built.dropped[0].reason
        == "the engine returned no prompt ids; the agent never had the reply: broke off"
    )


def test_reply_that_was_cut_off_is_kept_and_not_trained_on_and_its_retry_holds_the_line() -> None:
    built = build(
        [
            call(0, [1, 2], [3]),
            call(1, [1, 2, 3, 4], [5, 6], error="the agent went away", finish_reason=None),
            call(2, [1, 2, 3, 4], [5, 7]),
        ]
    )
    assert ids(built) == [[1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 6]]
    cut = built.segments[1]
    assert (cut.began, cut.ended, cut.role) == (SegmentStart.RETRY, SegmentStart.RETRY, SegmentRole.MAIN)
    assert cut.parent == Parent(segment_index=0, length=4)
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [3, 0]
    assert built.masked == ("2 sampled tokens: the agent never had the reply whole: the agent went away",)


def test_reply_that_came_whole_is_used_where_its_repetition_was_cut_off() -> None:
    built = build([call(0, [1, 2], [3]), call(1, [1, 2], [4], error="time limit")])
    assert ids(built) == [[1, 2, 3], [1, 2, 4]]
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [1, 0]
    assert built.segments[1].ended == SegmentStart.RETRY


def test_reply_that_was_cut_off_at_the_end_stays_at_the_end() -> None:
    built = build([call(0, [1, 2], [3]), call(1, [1, 2, 3, 4], [5], error="time limit")])
    assert ids(built) == [[1, 2, 3, 4, 5]]
    assert built.segments[0].ended == "aborted"
    assert built.tokens[0].loss_mask.tolist() == [0, 0, 1, 0, 0]


def test_agent_that_goes_on_without_the_reply_that_was_cut_off_goes_on_in_its_segment() -> None:
    built = build(
        [
            call(0, [1, 2], [3]),
            call(1, [1, 2, 3, 4], [5], error="stalled"),
            call(2, [1, 2, 3, 4, 9], [6]),
        ]
    )
    assert ids(built) == [[1, 2, 3, 4, 9, 6], [1, 2, 3, 4, 5]]
    assert built.segments[1].began is SegmentStart.BRANCH
    assert built.trained_tokens == 2


def test_question_on_the_side_leaves_the_line_in_one_segment() -> None:
    # A summary for a title, say: the whole context again, and a question that nobody goes on from.
    built = build(
        [
            call(0, [1, 2], [3]),
            call(1, [1, 2, 3, 8, 90], [91]),
            call(2, [1, 2, 3, 8, 4], [5]),
            call(3, [1, 2, 3, 8, 4, 5, 6], [7]),
        ]
    )
    assert ids(built) == [[1, 2, 3, 8, 4, 5, 6, 7], [1, 2, 3, 8, 90, 91]]
    side = built.segments[1]
    assert (side.role, side.began) == (SegmentRole.AUXILIARY, SegmentStart.BRANCH)
    assert side.parent == Parent(segment_index=0, length=4)
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [3, 0]


def test_agent_that_goes_back_to_an_earlier_point_holds_the_line_from_there() -> None:
    built = build(
        [
            call(0, [1, 2], [3]),
            call(1, [1, 2, 3, 4], [5]),
            call(2, [1, 2, 3, 4, 5, 6], [7]),
            call(3, [1, 2, 3, 9], [8]),
            call(4, [1, 2, 3, 9, 8, 10], [11]),
        ]
    )
    assert ids(built) == [[1, 2, 3, 9, 8, 10, 11], [1, 2, 3, 4, 5, 6, 7]]
    assert built.segments[1].parent == Parent(segment_index=0, length=3)
    assert (built.segments[1].began, built.segments[1].role) == (SegmentStart.BRANCH, SegmentRole.SUBAGENT)


SYSTEM = list(range(100, 130))


def summary(role: str) -> list[RecordedCall]:
    """A dialogue that is summed up and goes on from the summary, quoted in a message of `role`."""
    text = "The bug is in parse_dates; the fix is half done.\nTests in tests/test_dates.py fail."
    return [
        call(0, [*SYSTEM, 1, 2, 3], [4]),
        call(1, [*SYSTEM, 1, 2, 3, 4, 5], [6]),
        call(2, [*SYSTEM, 1, 2, 3, 4, 5, 6, 70], [71, 72], reply={"role": "assistant", "content": text}),
        call(3, [*SYSTEM, 80, 71, 81], [8], messages=({"role": role, "content": f"Summary:\n{text}"},)),
        call(4, [*SYSTEM, 80, 71, 81, 8, 9], [10]),
    ]


def test_summary_that_the_agent_goes_on_from_is_auxiliary_though_nobody_declared_it() -> None:
    built = build(summary("user"))
    main, aside, after = built.segments
    assert ids(built)[0] == [*SYSTEM, 1, 2, 3, 4, 5, 6]
    assert (aside.role, aside.began) == (SegmentRole.AUXILIARY, SegmentStart.BRANCH)
    assert aside.parent == Parent(segment_index=0, length=36)
    assert (after.role, after.began) == (SegmentRole.MAIN, SegmentStart.CONTEXT_REWRITTEN)
    assert after.parent == Parent(segment_index=0, length=30)
    assert main.ended == SegmentStart.CONTEXT_REWRITTEN
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [2, 0, 2]


def test_summary_is_recognised_where_the_reply_before_it_came_back_in_other_tokens() -> None:
    calls = summary("user")
    rewritten = np.array([*SYSTEM, 1, 2, 3, 4, 5, 66, 70], np.uint32)
    calls[2] = RecordedCall(
        calls[2].call, CallTokens(rewritten, calls[2].tokens.sampled_ids, calls[2].tokens.logprobs)
    )
    main, aside, after = build(calls).segments
    assert (aside.role, aside.began) == (SegmentRole.AUXILIARY, SegmentStart.CONTEXT_REWRITTEN)
    assert (main.role, after.role) == (SegmentRole.MAIN, SegmentRole.MAIN)


def test_last_action_before_old_messages_are_left_out_is_no_summary() -> None:
    built = build(summary("assistant"))
    assert len(built.segments) == 2
    assert built.trained_tokens == 6


def test_declared_summary_of_the_whole_context_forks_from_the_line() -> None:
    calls = summary("assistant")
    declared = calls[2].call.model_copy(update={"purpose": CallPurpose.AUXILIARY})
    calls[2] = RecordedCall(declared, calls[2].tokens)
    aside = build(calls).segments[1]
    assert (aside.role, aside.began) == (SegmentRole.AUXILIARY, SegmentStart.BRANCH)
    assert aside.parent == Parent(segment_index=0, length=36)


def test_subagent_with_the_opening_of_the_main_line_is_told_by_the_main_line_going_on() -> None:
    built = build(
        [
            call(0, [*SYSTEM, 1, 2, 3], [4]),
            call(1, [*SYSTEM, 50], [51]),
            call(2, [*SYSTEM, 60], [61]),
            call(3, [*SYSTEM, 50, 51, 52], [53]),
            call(4, [*SYSTEM, 60, 61, 62], [63]),
            call(5, [*SYSTEM, 1, 2, 3, 4, 5], [6]),
        ]
    )
    assert [(s.role, s.began, s.parent and s.parent.length) for s in built.segments] == [
        (SegmentRole.MAIN, SegmentStart.START, None),
        (SegmentRole.SUBAGENT, SegmentStart.SUBAGENT, 30),
        (SegmentRole.SUBAGENT, SegmentStart.SUBAGENT, 30),
    ]
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [2, 0, 0]


def test_versions_that_change_within_a_call_are_told_token_by_token() -> None:
    between = POLICY.model_copy(update={"version_high": 4})
    spans = (VersionSpan(start=0, length=1, version=3), VersionSpan(start=1, length=2, version=4))
    calls = [
        call(0, [1, 2], [3, 4, 5], policy=between, version_spans=spans),
        call(1, [1, 2, 3, 4, 5], [6], policy=between),
        call(2, [1, 2, 3, 4, 5, 6], [7, 8], policy=between, version_spans=spans[:1], error="cut off"),
    ]
    [segment] = build(calls).segments
    assert [(run.start, run.length, run.version_low, run.version_high) for run in segment.policy_runs] == [
        (2, 1, 3, 3),
        (3, 2, 4, 4),
        (5, 1, 3, 4),
        (6, 2, 3, 4),
    ]


def test_declared_subagent_keeps_its_role_though_it_asked_only_once() -> None:
    built = build(
        [
            call(0, [1, 2], [3]),
            call(1, [60, 61], [62], purpose=CallPurpose.SUBAGENT),
            call(2, [1, 2, 3, 4], [5]),
        ]
    )
    assert [segment.role for segment in built.segments] == [SegmentRole.MAIN, SegmentRole.SUBAGENT]


def test_tokens_of_another_policy_are_kept_and_not_trained_on() -> None:
    small = POLICY.model_copy(update={"policy_name": "small"})
    built = build(
        [call(0, [1, 2], [3]), call(1, [1, 2, 3, 4], [5], policy=small), call(2, [1, 2, 3, 4, 5, 6], [7])],
        policies=["policy"],
    )
    assert [run.policy_name for run in built.segments[0].policy_runs] == ["policy", "small", "policy"]
    assert built.tokens[0].loss_mask.tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert built.masked == (
        "1 sampled tokens: sampled by policy small, which is not the one that is trained",
    )


def test_replies_without_ids_are_named_as_gaps() -> None:
    built = build(
        [
            call(0, [], [], usage=Usage(completion_reported=12)),
            call(1, [], [], error="timed out"),
            call(2, [], [], reply={"role": "assistant"}),
            call(3, [1], []),
        ]
    )
    assert built.segments == ()
    assert [gap.split()[1].rstrip(":") for gap in built.gaps] == ["0", "1", "2"]
    assert "12 sampled tokens" in built.gaps[0]


def test_subagents_can_be_trained_on_by_choice() -> None:
    main = [call(0, [1, 2], [3]), call(1, [1, 2, 3, 4], [5])]
    subagent = [call(2, [60, 61], [62]), call(3, [60, 61, 62], [6])]
    built = build([*main, *subagent], roles=(SegmentRole.MAIN, SegmentRole.SUBAGENT), rollout_weight=2.0)
    assert [int(tokens.loss_mask.sum()) for tokens in built.tokens] == [2, 2]
    assert [segment.weight for segment in built.segments] == [1.0, 1.0]


def test_weights_add_up_to_the_rollout_where_nothing_is_trained_on() -> None:
    calls = [call(0, [1], [2, 3, 4], sampling_effective=WARM), call(1, [1, 9], [5], sampling_effective=WARM)]
    built = build(calls, rollout_weight=0.5)
    assert [segment.weight for segment in built.segments] == pytest.approx([0.375, 0.125])


def test_order_of_arrival_does_not_matter() -> None:
    for seed in range(20):
        calls = list(random_calls(seed))
        shuffled = random.Random(seed).sample(calls, len(calls))
        one, other = build(calls), build(shuffled)
        assert one.segments == other.segments
        assert ids(one) == ids(other)
        assert one.call_spans == other.call_spans
