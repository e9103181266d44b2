"""The benchmark's imagined trajectories are sound, repeatable, and of the kind that its page says."""

from __future__ import annotations

import numpy as np
import pytest

from hpcroll.contract import Trajectory
from hpcroll.shards import decode_trajectory, encode_trajectory
from hpcroll.testing import check
from tests.benchmarks.shards_corpus import TURN_ENDS, TURN_OPENS, VOCABULARY, corpus
from tests.benchmarks.shards_generator import GROUP_SIZE, LONGEST, SHORTEST, group_of
from tests.benchmarks.shards_statistics import describe

GROUPS = 10


@pytest.fixture(scope="module")
def made() -> list[Trajectory]:
    return [trajectory for group in range(GROUPS) for trajectory in group_of(group)]


def test_every_trajectory_keeps_the_invariants(made: list[Trajectory]) -> None:
    for trajectory in made:
        assert check(trajectory) == ()


def test_the_same_seed_gives_the_same_trajectories_and_another_seed_does_not(made: list[Trajectory]) -> None:
    again = group_of(GROUPS - 1)
    stored = [encode_trajectory(trajectory) for trajectory in made[-GROUP_SIZE:]]
    assert [encode_trajectory(trajectory) for trajectory in again] == stored
    other = group_of(GROUPS - 1, seed=2)
    assert [encode_trajectory(trajectory) for trajectory in other] != stored


def test_a_shard_gives_them_back(made: list[Trajectory]) -> None:
    restored = decode_trajectory(encode_trajectory(made[0]))
    assert restored.record == made[0].record
    for before, after in zip(made[0].tokens, restored.tokens, strict=True):
        np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_the_text_of_a_record_is_what_its_ids_say(made: list[Trajectory]) -> None:
    tokenizer = corpus().tokenizer
    for trajectory in made[::GROUP_SIZE]:
        said = [message for call in trajectory.record.calls for message in (*call.messages, call.reply)]
        told = [message["content"] for message in said if isinstance(message, dict)]
        for tokens in trajectory.tokens:
            plain = tokens.ids[(tokens.ids != TURN_OPENS) & (tokens.ids != TURN_ENDS)]
            text = tokenizer.decode(plain)
            assert text.startswith("system\n")
            told = [content for content in told if content not in text]
        assert told == []


def test_lengths_and_turns_are_those_of_agents(made: list[Trajectory]) -> None:
    figures = describe(made)
    assert SHORTEST <= figures.tokens[0] < figures.tokens[-1] <= LONGEST
    assert figures.tokens[-1] > 4 * figures.tokens[0]
    assert 8 <= figures.turns[0] < figures.turns[-1] <= 40
    assert 0.2 < figures.sampled < 0.4
    assert all(int(tokens.ids.max()) < VOCABULARY for trajectory in made for tokens in trajectory.tokens)


def test_ids_are_as_uneven_and_as_repetitive_as_those_of_text(made: list[Trajectory]) -> None:
    figures = describe(made)
    assert 0.4 < figures.frequent < 0.8
    assert 3.5 < figures.ids_ratio[0] < 6
    assert 1.3 * figures.ids_ratio[0] < figures.ids_ratio[1] < 3 * figures.ids_ratio[0]
    assert 0.25 < figures.siblings < 0.75
    assert 0.1 < figures.itself < 0.6


def test_siblings_have_more_in_common_than_strangers(made: list[Trajectory]) -> None:
    mixed = [made[group * GROUP_SIZE + group % GROUP_SIZE] for group in range(GROUP_SIZE)]
    strangers = [Trajectory(one.record.model_copy(update={"group_id": "mixed"}), one.tokens) for one in mixed]
    assert describe(strangers).siblings < 0.5 * describe(made).siblings


def test_most_samples_are_nearly_certain_some_are_not_and_none_compresses(made: list[Trajectory]) -> None:
    figures = describe(made)
    assert 0.5 < figures.certain < 0.8
    assert 0.01 < figures.surprising < 0.2
    values = np.concatenate([part.logprobs[part.sampled == 1] for part in made[0].tokens])
    assert (values < 0).all()
    assert len(np.unique(values)) > 0.99 * len(values)
