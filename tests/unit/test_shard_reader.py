"""The reader: what `done` confirms, each rollout once, from any saved position."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from hpcroll.contract import Status
from hpcroll.contract.policy import Branch, LineageBase, PolicyVersion
from hpcroll.errors import ConfigError, ShardCorruptError, ShardError
from hpcroll.fs import publish, replace
from hpcroll.shards import RunReader, StoredTrajectory, encode_trajectory, open_run
from hpcroll.shards.format.frames import parse_header
from tests.shard_runs import SEGMENT, ShardRun, bulk, ref, trajectory


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


def ordinals(stored: Any) -> list[int]:
    return [item.ref.ordinal for item in stored]


def test_what_was_committed_is_read_whole(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(10))
    for stored in open_run(run.paths.root):
        expected = trajectory(stored.ref.ordinal)
        assert stored.record == expected.record
        assert stored.trajectory().record.calls[0].messages == expected.record.calls[0].messages
        assert (stored.reward, stored.status) == (expected.record.reward, expected.record.status)
        assert (stored.attempt, stored.incarnation) == (1, "w0")
        for mine, theirs in zip(stored.tokens, expected.tokens, strict=True):
            np.testing.assert_array_equal(mine.ids, theirs.ids)
            np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)


def test_only_the_incarnation_that_done_names_is_delivered(run: ShardRun) -> None:
    with run.writer("w0") as loser, run.writer("w1") as winner:
        loser.append(trajectory(0))
        loser.append(trajectory(1))
        run.commit(winner, "w1", [0])
        reader = open_run(run.paths.root)
        assert [(item.rollout_id, item.incarnation) for item in reader] == [(f"{SEGMENT}/0", "w1")]
        assert reader.counts.superseded == 1
        # Nobody has committed rollout 1: it is not there yet, and becomes visible without being appended.
        run.confirm(1, "w0")
        assert len(open_run(run.paths.root)) == 2


def test_mark_without_done_delivers_nothing(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        writer.mark([writer.append(trajectory(0))])
        assert list(open_run(run.paths.root)) == []


def test_committed_record_without_a_mark_is_delivered(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(3), mark=False)
        run.commit(writer, "w0", range(3, 6))
    assert ordinals(open_run(run.paths.root)) == list(range(6))
    assert ordinals(open_run(run.paths.root, trust_marks=True)) == list(range(6))


def test_marks_can_stand_for_done_names(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(3))
    run.paths.done_link(run.leg, ref(1)).unlink()
    assert ordinals(open_run(run.paths.root)) == [0, 2]
    assert ordinals(open_run(run.paths.root, trust_marks=True)) == [0, 1, 2]


def test_done_of_the_last_leg_is_what_counts(tmp_path: Path) -> None:
    run = ShardRun.create(tmp_path / "run", legs=(("init", "run"), ("eval",)))
    assert run.leg == "eval"
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0])
        early = ShardRun(run.paths, "init+run")
        early.commit(writer, "w0", [1])
    assert ordinals(open_run(run.paths.root)) == [0]


def test_filters_choose_by_summary(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(12))
        run.commit(writer, "w0", [12], status=Status.FAILED, trainable=False, not_trainable_because=("x",))
        run.commit(writer, "w0", [13], reward=None, verdict=None, reward_valid=False)
    rewards = {n: trajectory(n).record.reward for n in range(12)}
    root = run.paths.root
    assert ordinals(open_run(root, min_reward=0.5, max_reward=0.5)) == [
        n for n in rewards if rewards[n] == 0.5
    ]
    assert ordinals(open_run(root, status="failed")) == [12]
    assert ordinals(open_run(root, status=["failed", "truncated"])) == [12]
    assert 12 not in ordinals(open_run(root, trainable=True))
    assert 13 not in ordinals(open_run(root, max_reward=1.0)), "no reward is not 0.0"
    assert len(open_run(root)) == 14
    assert len(open_run(root, status="failed")) == 1


def test_columns_that_were_not_read_are_refused(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0])
    (stored,) = open_run(run.paths.root, columns=["tokens"])
    assert len(stored.tokens) == len(trajectory(0).tokens)
    assert stored.summary.lengths == tuple(g.length for g in trajectory(0).record.segments)
    with pytest.raises(ShardError, match="column record was not read"):
        _ = stored.record
    (stored,) = open_run(run.paths.root, columns=["record"])
    assert stored.record.calls
    assert stored.record.calls[0].messages == ()
    with pytest.raises(ShardError, match="column tokens was not read"):
        _ = stored.tokens
    with pytest.raises(ConfigError, match="tokens, record, text"):
        open_run(run.paths.root, columns=["ids"])


def test_get_finds_one_rollout_with_or_without_its_mark(run: ShardRun) -> None:
    with run.writer("w0", shard_mb=1) as writer:
        for n in range(20):
            run.commit(writer, "w0", [n], **bulk(n))
        run.commit(writer, "w0", [30], mark=False)
    assert run.paths.shard_file("w0", 1).exists()
    reader = open_run(run.paths.root)
    for n in (0, 13, 19):
        assert reader.get(f"{SEGMENT}/{n}").record == trajectory(n, **bulk(n)).record
    assert reader.get(f"{SEGMENT}/30").record == trajectory(30).record
    with pytest.raises(ShardError, match="no committed result"):
        reader.get(f"{SEGMENT}/31")
    with pytest.raises(ShardError, match="not a rollout id"):
        reader.get("31")


def test_state_resumes_exactly_from_every_position(run: ShardRun) -> None:
    with run.writer("w0") as first, run.writer("w1") as second:
        run.commit(first, "w0", range(5), turns=1)
        run.commit(second, "w1", range(5, 10), turns=1)
        first.append(trajectory(10, turns=1))  # open: may still be committed
        whole = ordinals(open_run(run.paths.root))
        assert len(whole) == 10
        for taken in range(len(whole) + 1):
            reader = open_run(run.paths.root)
            stream = iter(reader)
            head = ordinals(next(stream) for _ in range(taken))
            state = json.loads(json.dumps(reader.state_dict()))
            resumed = open_run(run.paths.root)
            resumed.load_state_dict(state)
            assert head + ordinals(resumed) == whole
        run.confirm(10, "w0")
        resumed.load_state_dict(state)
        assert ordinals(resumed) == [10]


def test_state_of_another_run_or_trainer_is_refused(run: ShardRun) -> None:
    reader = open_run(run.paths.root)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        reader.load_state_dict({**reader.state_dict(), "run_id": "other"})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        reader.load_state_dict(reader.follow(trainer="grpo").state_dict())


def test_plain_reader_starts_anew_and_a_follower_goes_on(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(4))
        reader = open_run(run.paths.root)
        assert ordinals(reader) == ordinals(reader) == [0, 1, 2, 3]
        follower = reader.follow(stop=lambda: True)
        assert ordinals(follower) == [0, 1, 2, 3]
        assert ordinals(follower) == []
        run.commit(writer, "w0", [4])
        assert ordinals(follower) == [4]


def test_live_torn_tail_is_waited_for_and_a_finished_one_is_counted(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0, 1])
        path = writer.path
    whole = path.read_bytes()
    header = parse_header(whole)
    assert header is not None
    for torn in (whole[:-1], whole[:-1] + b"\0", whole[: header.record_bytes] + b"\0" * 500):
        path.write_bytes(torn)
        run.paths.ended_file("w0").unlink(missing_ok=True)
        reader = open_run(run.paths.root)
        assert ordinals(reader) == [0]
        assert (reader.counts.corrupt, reader.counts.committed_lost) == (0, 0)
        run.end("w0")
        reader = open_run(run.paths.root)
        assert ordinals(reader) == [0]
        assert (reader.counts.corrupt, reader.counts.committed_lost) == (1, 1)
        # Once the bytes are there, a follower that waited gets the record.
        run.paths.ended_file("w0").unlink()
        follower = open_run(run.paths.root).follow(stop=lambda: True)
        assert ordinals(follower) == [0]
        path.write_bytes(whole)
        assert ordinals(follower) == [1]


def test_append_that_failed_and_was_overwritten_misleads_no_follower(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0])
        follower = open_run(run.paths.root).follow(stop=lambda: True)
        size = writer.path.stat().st_size
        long = encode_trajectory(trajectory(9, **bulk(9)))
        with writer.path.open("ab") as shard:
            shard.write(long[: len(long) // 2])
        assert ordinals(follower) == [0]
        with writer.path.open("rb+") as shard:
            shard.truncate(size)
        run.commit(writer, "w0", [1, 2], turns=1)
        assert ordinals(follower) == [1, 2]
        assert (follower.counts.corrupt, follower.counts.committed_lost) == (0, 0)


def test_damage_in_the_middle_costs_only_the_records_it_hit(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", range(6))
        path = writer.path
    run.end("w0")
    data = bytearray(path.read_bytes())
    data[addresses[1].offset + 20] ^= 1  # a header
    data[addresses[4].offset + addresses[4].length - 1] ^= 1  # the last frame
    path.write_bytes(bytes(data))
    reader = open_run(run.paths.root)
    assert ordinals(reader) == [0, 2, 3, 5]
    assert (reader.counts.corrupt, reader.counts.committed_lost) == (2, 2)
    with pytest.raises(ShardCorruptError, match="shards verify"):
        reader.get(f"{SEGMENT}/1")


def test_groups_complete_any_and_min_usable(run: ShardRun) -> None:
    usable: dict[str, Any] = {"trainable": True, "not_trainable_because": ()}
    unusable: dict[str, Any] = {"trainable": False, "not_trainable_because": ("x",)}
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0, 4, 1, 5, 2, 6, 3], **usable)  # group 0 is complete, group 1 lacks one
        run.commit(writer, "w0", [8], **usable)
        run.commit(writer, "w0", [9, 10, 11], **unusable)  # group 2: one is usable
    reader = open_run(run.paths.root)

    def told(groups: Any) -> list[tuple[str, list[int]]]:
        return [(group.group_id[-2:], ordinals(group.members)) for group in groups]

    assert told(reader.groups()) == [("g0", [0, 1, 2, 3]), ("g2", [8, 9, 10, 11])]
    assert reader.group_counts.incomplete == 1
    assert told(reader.groups("any")) == [
        ("g0", [0, 1, 2, 3]),
        ("g2", [8, 9, 10, 11]),
        ("g1", [4, 5, 6]),
    ]
    assert told(reader.groups(min_usable=3)) == [("g0", [0, 1, 2]), ("g1", [4, 5, 6])]
    assert (reader.group_counts.short, reader.group_counts.late) == (1, 1)
    with pytest.raises(ConfigError, match="complete or any"):
        reader.groups("some")
    with pytest.raises(ConfigError, match="1 or more"):
        reader.groups(min_usable=0)


def _resumes(run: ShardRun, start: Callable[[RunReader], Any], show: Callable[[Any], Any]) -> None:
    whole = [show(item) for item in start(open_run(run.paths.root))]
    assert len(whole) > 2
    for taken in range(1, len(whole)):
        reader = open_run(run.paths.root)
        stream = start(reader)
        head = [show(next(stream)) for _ in range(taken)]
        resumed = open_run(run.paths.root)
        resumed.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        assert head + [show(item) for item in start(resumed)] == whole


def test_groups_and_batches_resume_exactly(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [n for k in range(4) for n in range(k, 16, 4)])
    _resumes(run, lambda reader: reader.groups(), lambda group: group.group_id)
    _resumes(run, lambda reader: reader.groups(min_usable=2), lambda group: ordinals(group.members))
    _resumes(run, lambda reader: reader.packed(2500), lambda batch: batch.ids.tolist())


def test_state_within_groups_is_not_read_as_single_rollouts(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0, 1, 2, 3, 4])
        reader = open_run(run.paths.root)
        reader.load_state_dict(_after_first_group(reader))
        assert ordinals(reader.groups("any").__next__().members) == [4]
        run.commit(writer, "w0", [5])
        saved = _after_first_group(open_run(run.paths.root), early=2)
        reader.load_state_dict(saved)
        with pytest.raises(ConfigError, match="within groups"):
            iter(reader)


def _after_first_group(reader: RunReader, *, early: int | None = None) -> dict[str, Any]:
    next(reader.groups(min_usable=early) if early else reader.groups())
    return reader.state_dict()


def test_packed_batches_hold_every_trained_token_once(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(16))
    batches = list(open_run(run.paths.root).packed(3000))
    assert all(len(batch.ids) <= 3000 for batch in batches)
    seen: dict[str, list[tuple[int, float, float]]] = {}
    for batch in batches:
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == len(batch.ids) == len(batch.logprobs) == len(batch.loss_mask)
        assert (batch.ids.dtype, batch.cu_seqlens.dtype, batch.logprobs.dtype) == ("u4", "i4", "f4")
        for s in range(len(batch)):
            span = slice(batch.cu_seqlens[s], batch.cu_seqlens[s + 1])
            assert np.isfinite(batch.logprobs[span][batch.loss_mask[span] == 1]).all()
            trained = int(batch.loss_mask[span].sum())
            row = (trained, float(batch.reward[s]), float(batch.rollout_weight[s]))
            seen.setdefault(str(batch.rollout_id[s]), []).append(row)
            assert batch.group_id[s].startswith(SEGMENT)
            assert batch.version_low[s] <= batch.version_high[s]
    for n in range(16):
        expected = trajectory(n)
        rows = seen.pop(f"{SEGMENT}/{n}", [])
        assert sum(row[0] for row in rows) == sum(int(t.loss_mask.sum()) for t in expected.tokens)
        if rows:
            assert {row[1] for row in rows} == {expected.record.reward}
            assert sum(row[2] for row in rows) == pytest.approx(1.0)
    assert not seen


def test_segment_longer_than_a_batch_is_refused_by_name(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(4))
    with pytest.raises(ShardError, match=f"rollout {SEGMENT}/0: segment 0 has .* raise max_tokens"):
        list(open_run(run.paths.root).packed(10))


def test_rollouts_that_lag_too_far_behind_are_counted_as_stale(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8), turns=1)
    reader = open_run(run.paths.root)
    oldest = {item.rollout_id: item.summary.oldest_version for item in reader}

    def publish_version(version: int, lineage: str = "main") -> None:
        newest = PolicyVersion(policy_name="policy", lineage=lineage, version=version)
        replace(run.paths.policy_latest("policy"), newest.to_json().encode())

    assert len(ordinals(reader.follow(stop=lambda: True, max_lag=0))) == 8, "nothing is published yet"
    publish_version(4)
    fresh = reader.follow(stop=lambda: True, max_lag=4)
    assert [item.rollout_id for item in fresh] == list(oldest)
    publish_version(5)
    fresh = reader.follow(stop=lambda: True, max_lag=4)
    kept = [name for name, version in oldest.items() if version is not None and version >= 1]
    assert [item.rollout_id for item in fresh] == kept
    assert fresh.group_counts.stale == 8 - len(kept) > 0
    publish_version(0, "restarted")
    assert list(reader.follow(stop=lambda: True, max_lag=100)) == []


def test_lag_counts_on_across_a_restart_from_an_older_version(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8), turns=1)
    reader = open_run(run.paths.root)
    sampled = {item.rollout_id: item.summary for item in reader if item.summary.oldest_version is not None}
    newest = PolicyVersion(
        policy_name="policy",
        lineage="restarted",
        version=3,
        parent=Branch(lineage="main", version=0),
        base=LineageBase(version=0),
    )
    replace(run.paths.policy_latest("policy"), newest.to_json().encode())
    for max_lag in range(4):
        fresh = reader.follow(stop=lambda: True, max_lag=max_lag)
        had = {item.rollout_id for item in fresh if item.summary.oldest_version is not None}
        assert had == {
            name
            for name, summary in sampled.items()
            if max(summary.version_high) <= 0 and 3 - (summary.oldest_version or 0) <= max_lag
        }, max_lag
    assert had, "what both branches have in common"
    assert any(max(summary.version_high) > 0 for summary in sampled.values()), "from the branch that was left"


def test_ranks_without_a_name_or_out_of_range_are_refused(run: ShardRun) -> None:
    reader = open_run(run.paths.root)
    with pytest.raises(ConfigError, match=r"rank=1, world=2.*trainer's name"):
        reader.follow(rank=1, world=2)
    with pytest.raises(ConfigError, match="rank 2 is not one of the 2 ranks"):
        reader.follow(rank=2, world=2, trainer="grpo")
    with pytest.raises(ConfigError, match="names no trainer"):
        reader.follow(trainer=".hidden")


def test_follower_ends_when_the_run_is_closed(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0])
    publish(run.paths.closed, b"{}")
    assert ordinals(open_run(run.paths.root).follow(poll_s=0.01)) == [0]


def test_missing_run_and_newer_schema_are_named(tmp_path: Path, run: ShardRun) -> None:
    with pytest.raises(ShardError, match="holds no run"):
        open_run(tmp_path / "nothing")
    replace(run.paths.run_json, b'{"schema_version":"2.0"}')
    with pytest.raises(ShardError, match="schema version 2"):
        open_run(run.paths.root)


def test_memory_does_not_grow_with_the_run(run: ShardRun) -> None:
    def peak_bytes(delivered: int) -> int:
        tracemalloc.start()
        reader = open_run(run.paths.root, columns=["tokens"])
        assert sum(1 for item in reader if item.tokens) == delivered
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(20), turns=1)
        small = peak_bytes(20)
        run.commit(writer, "w0", range(20, 160), turns=1)
        read = sum(path.stat().st_size for path in run.paths.shards.glob("*.shard"))
        assert peak_bytes(160) - small < read / 5


def test_reader_imports_fast_and_without_the_rollout_side() -> None:
    code = (
        # This thread's CPU time: other processes of the machine, and numpy's idle threads, do not count.
        "import sys, time; start = time.thread_time(); import hpcroll.shards\n"
        "print(time.thread_time() - start)\n"
        "heavy = {'submitit', 'spython', 'filelock', 'aiohttp', 'torch', 'yaml', 'typer', 'rich'}\n"
        "heavy.add('pydantic')  # its models alone cost more than numpy\n"
        "print(*heavy.intersection(sys.modules))"
    )
    took_s = []
    for _ in range(10):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        seconds, heavy = done.stdout.splitlines()
        assert heavy == ""
        took_s.append(float(seconds))
        if took_s[-1] < 0.4:
            return
    pytest.fail(f"importing hpcroll.shards took {min(took_s):.2f} s at best of {len(took_s)} starts")


def test_stored_trajectory_is_what_get_returns(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0])
    assert isinstance(open_run(run.paths.root).get(f"{SEGMENT}/0"), StoredTrajectory)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_holds_the_same_tokens_in_rows(run: ShardRun, side: Literal["left", "right"]) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8))
    for batch in open_run(run.paths.root).packed(3000):
        padded = batch.padded(side=side, pad_id=9, multiple_of=64)
        lengths = np.diff(batch.cu_seqlens)
        width = padded.ids.shape[1]
        assert padded.ids.shape == (len(batch), width)
        assert width % 64 == 0
        assert 0 <= width - lengths.max() < 64
        for s, length in enumerate(lengths):
            own = slice(batch.cu_seqlens[s], batch.cu_seqlens[s + 1])
            real = slice(0, length) if side == "right" else slice(width - length, width)
            for name in ("ids", "logprobs", "loss_mask", "position_ids"):
                row = getattr(padded, name)[s]
                np.testing.assert_array_equal(row[real], getattr(batch, name)[own])
                padding = np.delete(row, np.r_[real])
                assert (padding == (9 if name == "ids" else 0)).all()
            assert padded.attention_mask[s].sum() == length
            assert padded.attention_mask[s][real].all()
            np.testing.assert_array_equal(batch.position_ids[own], np.arange(length))
            assert (batch.segment_of_token[own] == s).all()
        assert batch.max_seqlen == lengths.max()


def test_filters_choose_by_policy_and_versions(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(12))
    root = run.paths.root
    summaries = {item.ref.ordinal: item.summary for item in open_run(root)}
    assert any(summary.oldest_version == 1 for summary in summaries.values())
    assert ordinals(open_run(root, policy="other")) == []
    assert ordinals(open_run(root, policy=["other", "policy"])) == list(summaries)
    old = [n for n, summary in summaries.items() if max(summary.version_high) <= 0]
    assert ordinals(open_run(root, max_version=0)) == old
    new = [n for n, summary in summaries.items() if (summary.oldest_version or 0) >= 1]
    assert ordinals(open_run(root, min_version=1)) == new
    assert 0 < len(old) < 12
