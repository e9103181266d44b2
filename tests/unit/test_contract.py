"""The contract: versions, identities, and what a record refuses."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from hpcroll.contract import Rollout, RolloutRef, Sampling, StopReason, Task, TrajectoryRecord, Verdict
from hpcroll.errors import SchemaVersionError

TASK = {"task_id": "t", "handler": "math", "prompt": "What is 1 + 1?"}
SEGMENT = "0123456789abcdef"


def test_a_record_survives_its_json() -> None:
    task = Task(**TASK, spec={"answer": "2"})
    assert Task.from_json(task.to_json()) == task


def test_equal_tasks_have_equal_digests_whatever_the_order_of_their_keys() -> None:
    one = Task(**TASK, spec={"a": 1, "b": 2})
    other = Task.model_validate(dict(reversed(one.model_dump().items())) | {"spec": {"b": 2, "a": 1}})
    assert one.digest() == other.digest()


@pytest.mark.parametrize("model", [Task, Verdict, TrajectoryRecord])
def test_a_newer_major_version_is_refused_by_name(model: type[Task]) -> None:
    with pytest.raises(
        SchemaVersionError, match=rf"{model.__name__} has schema version 2\.0, this hpcroll reads 1"
    ):
        model.from_json(json.dumps({**TASK, "schema_version": "2.0"}))


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    read = Task.from_json(json.dumps({**TASK, "schema_version": "1.7", "colour": "blue"}))
    assert read.task_id == "t"
    assert read.schema_version == "1.7"


def test_an_unknown_field_of_this_version_is_a_typing_error() -> None:
    with pytest.raises(ValidationError, match="unknown fields promt in a Task"):
        Task.from_json(json.dumps({**TASK, "promt": "x"}))


@pytest.mark.parametrize("version", ["1", "one.two", "1.0.0", " 1.0"])
def test_a_malformed_version_is_refused(version: str) -> None:
    with pytest.raises(SchemaVersionError, match=r"MAJOR\.MINOR"):
        Task.from_json(json.dumps({**TASK, "schema_version": version}))


@pytest.mark.parametrize(
    ("reward", "because"), [(None, None), (1.0, "it has one"), (float("nan"), None), (float("inf"), None)]
)
def test_a_verdict_has_a_finite_reward_or_a_reason(reward: float | None, because: str | None) -> None:
    with pytest.raises(ValidationError):
        Verdict(reward=reward, no_reward_because=because)


def test_null_is_not_zero() -> None:
    assert Verdict(reward=None, no_reward_because="the tests did not run").reward is None
    assert Verdict(reward=0.0).reward == 0.0


def test_rollout_ids_name_segment_and_ordinal() -> None:
    ref = RolloutRef.parse(f"{SEGMENT}/17")
    assert (ref.segment, ref.ordinal, str(ref)) == (SEGMENT, 17, f"{SEGMENT}/17")
    rollout = Rollout(ref=ref, task=Task(**TASK), sample_index=1, group_size=8)
    assert rollout.group_id == f"{SEGMENT}/g2"


@pytest.mark.parametrize("text", ["", "17", f"{SEGMENT}/", f"{SEGMENT}/x", "nothex/1", f"{SEGMENT}/-1"])
def test_a_malformed_rollout_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - pydantic's own error is one, too
        RolloutRef.parse(text)


def test_only_limits_truncate() -> None:
    assert [reason for reason in StopReason if reason.truncates] == [
        StopReason.TURN_LIMIT,
        StopReason.TOKEN_LIMIT,
        StopReason.CONTEXT_LIMIT,
        StopReason.TIME_LIMIT,
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7},
        {"temperature": None},
        {"top_p": 0.9},
        {"top_k": 20},
        {"top_k": None},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
    ],
)
def test_sampling_is_plain_only_where_nothing_shapes_the_distribution(change: dict[str, float]) -> None:
    plain = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
    assert plain.is_plain()
    assert not plain.model_copy(update=change).is_plain()
