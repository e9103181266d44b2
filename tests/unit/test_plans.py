"""Steps from plans: every rank takes the same ones, and a restart takes them again."""

from __future__ import annotations

import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract.policy import PolicyVersion
from hpcroll.errors import ConfigError, ShardCorruptError, ShardError
from hpcroll.fs import publish, replace
from hpcroll.shards import Batch, RunReader, Step, open_run
from hpcroll.shards.reading.balance import balance
from tests.shard_runs import SEGMENT, ShardRun, trajectory

USABLE: dict[str, Any] = {"trainable": True, "not_trainable_because": ()}
MAX_TOKENS = 4000


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def commit(run: ShardRun, ordinals: range, *, incarnation: str = "w0", **fields: Any) -> None:
    with run.writer(incarnation) as writer:
        run.commit(writer, incarnation, ordinals, **USABLE | fields)


def follower(run: ShardRun, rank: int = 0, world: int = 1, **settings: Any) -> RunReader:
    return open_run(run.paths.root).follow(trainer="grpo", rank=rank, world=world, poll_s=0.01, **settings)


def told(step: Step) -> tuple[int, list[list[tuple[str, int]]]]:
    """What a step holds, comparable."""
    return step.number, [contents(batch) for batch in step.batches]


def contents(batch: Batch) -> list[tuple[str, int]]:
    return [(str(name), int(n)) for name, n in zip(batch.rollout_id, np.diff(batch.cu_seqlens), strict=True)]


def group_ids(steps: list[Step]) -> list[str]:
    return [group.group_id for step in steps for group in step.groups]


def test_a_step_holds_whole_groups_and_their_statistics(run: ShardRun) -> None:
    commit(run, range(16))
    publish(run.paths.closed, b"{}")
    steps = list(follower(run).steps(groups=2, max_tokens=MAX_TOKENS))
    assert [step.number for step in steps] == [1, 2]
    assert group_ids(steps) == [f"{SEGMENT}/g{n}" for n in range(4)]
    for step in steps:
        for batch in step.batches:
            assert len(batch.ids) <= MAX_TOKENS
            for s in range(len(batch)):
                first = int(str(batch.group_id[s]).rpartition("g")[2]) * 4
                rewards = [trajectory(n).record.reward for n in range(first, first + 4)]
                assert batch.group_reward_mean[s] == pytest.approx(np.mean(rewards))  # type: ignore[arg-type]
                assert batch.group_reward_std[s] == pytest.approx(np.std(rewards))  # type: ignore[arg-type]
                assert batch.group_count[s] == 4
    assert [step.settled_groups for step in steps] == [2, 4]
    with_tokens = sum(any(t.loss_mask.any() for t in trajectory(n).tokens) for n in range(16))
    assert sum(step.rollouts for step in steps) == with_tokens
    trained = sum(int(batch.loss_mask.sum()) for step in steps for batch in step.batches)
    assert trained == sum(step.trained_tokens for step in steps)
    assert trained == sum(int(t.loss_mask.sum()) for n in range(16) for t in trajectory(n).tokens)


def test_dropped_groups_are_told_of_while_a_step_waits_for_others(run: ShardRun) -> None:
    heard: list[tuple[int, int]] = []

    def settle(settled: int, /, *, dropped: int) -> None:
        heard.append((settled, dropped))
        if settled == 2:  # what a window lets start in their place
            commit(run, range(8, 16), incarnation="w1")
            publish(run.paths.closed, b"{}")

    commit(run, range(4), reward=1.0)
    commit(run, range(4, 8), incarnation="w2", trainable=False, not_trainable_because=("masked",))
    steps = follower(run, min_usable=2).steps(
        groups=2, max_tokens=MAX_TOKENS, drop_zero_variance=True, settle=settle
    )
    step = next(steps)
    assert heard == [(1, 1), (2, 2)]
    assert group_ids([step]) == [f"{SEGMENT}/g2", f"{SEGMENT}/g3"]
    assert (step.settled_groups, step.counts.zero_variance, step.counts.short) == (4, 1, 1)


def test_ranks_take_the_same_steps_and_share_their_rows(run: ShardRun) -> None:
    commit(run, range(32))
    publish(run.paths.closed, b"{}")

    def rank_steps(rank: int) -> list[Step]:
        return list(follower(run, rank, 3).steps(groups=3, max_tokens=MAX_TOKENS))

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(rank_steps, range(3)))
    whole = list(open_run(run.paths.root).steps(groups=3, max_tokens=MAX_TOKENS))
    assert len(whole) == len(ranks[0]) == 3
    for number, alone in enumerate(whole):
        mine = [steps[number] for steps in ranks]
        assert len({len(step.batches) for step in mine}) == 1
        assert len({(step.number, step.groups, step.counts, step.versions) for step in mine}) == 1
        together = [row for step in mine for batch in step.batches for row in contents(batch)]
        assert sorted(together) == sorted(row for batch in alone.batches for row in contents(batch))


def test_a_restart_replays_published_steps_and_goes_on(run: ShardRun) -> None:
    commit(run, range(24))
    reader = follower(run)
    stream = reader.steps(groups=1, max_tokens=MAX_TOKENS)
    states, first = [json.loads(json.dumps(reader.state_dict()))], []
    for _ in range(4):
        first.append(told(next(stream)))
        states.append(json.loads(json.dumps(reader.state_dict())))
    # Killed. Meanwhile more was committed, in a shard that is read before the others.
    commit(run, range(24, 32), incarnation="a0")
    publish(run.paths.closed, b"{}")
    for taken, state in enumerate(states):
        again = follower(run)
        again.load_state_dict(state)
        steps = list(again.steps(groups=1, max_tokens=MAX_TOKENS))
        assert [told(step) for step in steps][: 4 - taken] == first[taken:]
        assert [step.number for step in steps] == list(range(taken + 1, 9))
    fresh = list(follower(run).steps(groups=1, max_tokens=MAX_TOKENS))
    assert [told(step) for step in fresh][:4] == first
    assert sorted(group_ids(fresh)) == sorted(f"{SEGMENT}/g{n}" for n in range(8))


def test_another_world_branches_off_from_the_state(run: ShardRun) -> None:
    commit(run, range(32))
    publish(run.paths.closed, b"{}")
    reader = follower(run)
    stream = reader.steps(groups=2, max_tokens=MAX_TOKENS)
    before = [next(stream), next(stream)]
    state = reader.state_dict()
    assert len(list(stream)) == 2, "the old branch goes on as well"

    def rank_steps(rank: int) -> list[Step]:
        rank_reader = follower(run, rank, 2)
        rank_reader.load_state_dict(state)
        return list(rank_reader.steps(groups=2, max_tokens=MAX_TOKENS))

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(rank_steps, range(2))
    assert [step.number for step in one] == [step.number for step in two] == [3, 4]
    assert sorted(group_ids(before + one)) == sorted(f"{SEGMENT}/g{n}" for n in range(8))


def test_a_rank_that_loses_a_step_to_a_twin_takes_what_the_twin_planned(run: ShardRun) -> None:
    commit(run, range(16))
    publish(run.paths.closed, b"{}")
    one, two = (follower(run).steps(groups=1, max_tokens=MAX_TOKENS) for _ in range(2))
    seen: dict[int, list[Any]] = {}
    chance = random.Random(1)
    left = [one, two]
    while left:
        stream = chance.choice(left)
        step = next(stream, None)
        if step is None:
            left.remove(stream)
        else:
            seen.setdefault(step.number, []).append(told(step)[1])
    assert sorted(seen) == [1, 2, 3, 4]
    assert all(mine == theirs for mine, theirs in seen.values())


def test_groups_without_variance_are_counted_and_replaced(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        for group in range(6):
            rewards = [1.0] * 4 if group % 2 else [1.0, 0.0, 0.0, 1.0]
            for sample, reward in enumerate(rewards):
                run.commit(writer, "w0", [4 * group + sample], reward=reward, **USABLE)
    publish(run.paths.closed, b"{}")
    reader = follower(run)
    steps = list(reader.steps(groups=2, max_tokens=MAX_TOKENS, drop_zero_variance=True))
    assert [[g.group_id[-1] for g in step.groups] for step in steps] == [["0", "2"], ["4"]]
    assert [(s.counts.delivered, s.counts.zero_variance, s.settled_groups) for s in steps] == [
        (2, 1, 3),
        (3, 3, 6),
    ]
    assert all(g.reward_mean == 0.5 and g.reward_std == 0.5 for step in steps for g in step.groups)


def test_the_last_step_can_be_dropped(run: ShardRun) -> None:
    commit(run, range(12))
    publish(run.paths.closed, b"{}")
    settings: dict[str, Any] = {"groups": 2, "max_tokens": MAX_TOKENS}
    kept = list(follower(run).steps(**settings))
    dropped = list(follower(run).steps(**settings, last="drop"))
    assert [len(step.groups) for step in kept] == [2, 1]
    assert [len(step.groups) for step in dropped] == [2]


def test_steps_count_rollouts_or_fill_micro_batches(run: ShardRun) -> None:
    commit(run, range(24))
    publish(run.paths.closed, b"{}")
    by_rollouts = list(follower(run).steps(rollouts=6, max_tokens=MAX_TOKENS))
    assert [sum(group.usable for group in step.groups) for step in by_rollouts] == [8, 8, 8]
    filled = list(follower(run).steps(max_tokens=2500))
    assert all(len(step.batches) == 1 for step in filled)
    packed = list(open_run(run.paths.root).packed(2500))
    assert [contents(step.batches[0]) for step in filled] == [contents(batch) for batch in packed]


def test_packed_on_several_ranks_deals_the_batches_out(run: ShardRun) -> None:
    commit(run, range(24))
    publish(run.paths.closed, b"{}")
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: list(follower(run, rank, 2).packed(2500)), range(2)))
    whole = [contents(batch) for batch in open_run(run.paths.root).packed(2500)]
    dealt = [contents(batch) for pair in zip(*ranks, strict=True) for batch in pair]
    assert [batch for batch in dealt if batch] == whole
    assert sum(not batch for batch in dealt) == len(whole) % 2


def test_a_stopped_follower_ends_every_rank_and_a_restart_goes_on(run: ShardRun) -> None:
    commit(run, range(8))
    stopping = False

    def rank_steps(rank: int) -> list[tuple[list[str], dict[str, Any]]]:
        nonlocal stopping
        reader = follower(run, rank, 2, stop=lambda: stopping)
        found = []
        for step in reader.steps(groups=1, max_tokens=MAX_TOKENS, timeout_s=60):
            found.append((group_ids([step]), reader.state_dict()))
            stopping = stopping or step.number == 2
        return found

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(rank_steps, range(2))
    assert one == two
    assert len(one) == 2
    # Restarted from the last state that was saved, which is from before the end.
    stopping = False
    commit(run, range(8, 16), incarnation="w1")
    publish(run.paths.closed, b"{}")

    def resumed(rank: int) -> list[str]:
        reader = follower(run, rank, 2)
        reader.load_state_dict(one[-1][1])
        return group_ids(list(reader.steps(groups=1, max_tokens=MAX_TOKENS, timeout_s=60)))

    with ThreadPoolExecutor(2) as pool:
        later, same = pool.map(resumed, range(2))
    assert later == same == [f"{SEGMENT}/g2", f"{SEGMENT}/g3"]


def newer_segments(ordinal: int, by: int) -> tuple[Any, ...]:
    """The segments of rollout `ordinal`, sampled by versions that are `by` higher."""

    def newer(policy_run: Any) -> Any:
        low, high = policy_run.version_low + by, policy_run.version_high + by
        return policy_run.model_copy(update={"version_low": low, "version_high": high})

    return tuple(
        segment.model_copy(update={"policy_runs": tuple(map(newer, segment.policy_runs))})
        for segment in trajectory(ordinal).record.segments
    )


def test_what_went_stale_while_a_step_was_filling_is_replaced(run: ShardRun) -> None:
    commit(run, range(4))
    looks = 0
    published_at = math.inf

    def publish_and_commit_more() -> bool:
        nonlocal looks, published_at
        looks += 1
        if looks == 2:  # the first group was chosen in the look before
            newest = PolicyVersion(policy_name="policy", lineage="main", version=11)
            replace(run.paths.policy_latest("policy"), newest.to_json().encode())
            published_at = time.monotonic()
        elif time.monotonic() - published_at > 0.3:  # longer than the version before is remembered
            published_at = math.inf
            for n in range(4, 12):
                commit(run, range(n, n + 1), incarnation=f"w{n}", segments=newer_segments(n, 10))
        return False

    reader = follower(run, max_lag=3, stop=publish_and_commit_more)
    step = next(reader.steps(groups=2, max_tokens=MAX_TOKENS))
    assert group_ids([step]) == [f"{SEGMENT}/g1", f"{SEGMENT}/g2"]
    assert (step.counts.delivered, step.counts.stale, step.settled_groups) == (2, 1, 3)
    assert step.versions.published == 11
    assert step.versions.low == 10


def test_plans_end_by_name_what_they_cannot_do(run: ShardRun) -> None:
    commit(run, range(4))
    with pytest.raises(ConfigError, match="give one of the two"):
        follower(run).steps(groups=1, rollouts=1, max_tokens=1)
    with pytest.raises(ConfigError, match="groups is 0"):
        follower(run).steps(groups=0, max_tokens=1)
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        follower(run).steps(max_tokens=0)
    with pytest.raises(ShardError, match=f"rollout {SEGMENT}/0: segment 0 has .* raise max_tokens"):
        next(follower(run).steps(groups=1, max_tokens=10))
    with pytest.raises(ShardError, match=r"rank 1: no plan of step 1 .* no sign of life from rank 0"):
        next(follower(run, 1, 2).steps(groups=1, max_tokens=MAX_TOKENS, timeout_s=0.1))


def test_a_damaged_plan_is_named(run: ShardRun) -> None:
    commit(run, range(8))
    reader = follower(run)
    next(reader.steps(groups=1, max_tokens=MAX_TOKENS))
    (plan,) = run.paths.reader_directory("grpo").glob("*/1")
    whole = bytearray(plan.read_bytes())
    whole[len(whole) // 2] ^= 1
    plan.write_bytes(whole)
    with pytest.raises(ShardCorruptError, match="is no plan, or was damaged"):
        next(follower(run).steps(groups=1, max_tokens=MAX_TOKENS))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 100), max_size=60),
    st.integers(1, 5),
    st.integers(100, 300),
)
def test_balance_lays_every_row_out_once_within_the_bound(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    layout = balance(lengths, ranks=ranks, max_tokens=max_tokens)
    assert len(layout) == ranks
    assert len({len(batches) for batches in layout}) == 1
    bins = [batch for batches in layout for batch in batches]
    assert sorted(row for batch in bins for row in batch) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in batch) <= max_tokens for batch in bins)
    assert all(bins) or len(lengths) < len(bins)
    assert layout == balance(lengths, ranks=ranks, max_tokens=max_tokens)


def test_balance_gives_ranks_about_the_same_tokens() -> None:
    chance = random.Random(4)
    lengths = [chance.randint(4000, 60_000) for _ in range(128)]
    layout = balance(lengths, ranks=8, max_tokens=65_536)
    totals = [sum(lengths[row] for batch in batches for row in batch) for batches in layout]
    assert max(totals) < 1.05 * min(totals)
    fewest = -(-sum(lengths) // (8 * 65_536))
    assert len(layout[0]) <= fewest + 2
