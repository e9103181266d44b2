"""A record's bytes: what goes in comes out, and not one flipped or missing bit passes."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract import (
    ExtraColumn,
    Ragged,
    Segment,
    SegmentTokens,
    StageTiming,
    StopReason,
    Timing,
    Trajectory,
)
from hpcroll.errors import SchemaVersionError, ShardCorruptError, ShardError
from hpcroll.shards import Summary, decode_trajectory, encode_trajectory, open_run
from hpcroll.shards.format.codec import read_extra_columns, read_record, read_summary
from hpcroll.shards.format.commit_log import ENTRY_BYTES, RecordAddress, pack_mark, parse_marks
from hpcroll.shards.format.frames import FrameKind, open_frame, parse_header
from hpcroll.shards.format.summary import pack_summary, parse_summary
from hpcroll.shards.format.token_bytes import pack_logprobs, pack_tokens, parse_logprobs, parse_tokens
from hpcroll.testing.trajectories import random_trajectory
from tests.shard_runs import SEGMENT, ShardRun, ref, trajectory

seeded = settings(derandomize=True, deadline=None, max_examples=30)


def assert_same(one: Trajectory, other: Trajectory) -> None:
    assert one.record == other.record
    assert len(one.tokens) == len(other.tokens)
    for mine, theirs in zip(one.tokens, other.tokens, strict=True):
        for column in SegmentTokens.__dataclass_fields__:
            a, b = getattr(mine, column), getattr(theirs, column)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@seeded
@given(st.integers(0, 2**31), st.integers(0, 2**32 - 1), st.integers(1, 1000))
def test_decoding_gives_what_was_encoded(seed: int, ordinal: int, attempt: int) -> None:
    original = random_trajectory(seed, rollout_id=f"fedcba9876543210/{ordinal}", attempt=attempt)
    assert_same(decode_trajectory(encode_trajectory(original)), original)


def test_logprobs_survive_bit_for_bit_and_context_stays_nan() -> None:
    original = trajectory(1)
    decoded = decode_trajectory(encode_trajectory(original))
    for mine, theirs in zip(decoded.tokens, original.tokens, strict=True):
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()


def test_lone_surrogates_in_an_agents_text_do_not_stop_a_commit() -> None:
    original = trajectory(1)
    call = original.record.calls[0].model_copy(update={"messages": ({"content": "a\ud800b"},)})
    fields = {"calls": (call, *original.record.calls[1:]), "answer": "\udfff"}
    odd = Trajectory(original.record.model_copy(update=fields), original.tokens)
    assert_same(decode_trajectory(encode_trajectory(odd)), odd)


def test_trajectory_without_segments_is_stored() -> None:
    original = trajectory(1)
    fields = {"segments": (), "call_spans": (), "calls": (), "dropped": ()}
    empty = Trajectory(original.record.model_copy(update=fields), ())
    assert_same(decode_trajectory(encode_trajectory(empty)), empty)


def test_every_flipped_bit_is_noticed() -> None:
    data = bytearray(encode_trajectory(trajectory(2, turns=2)))
    chance = random.Random(0)
    for position in range(len(data)):
        data[position] ^= (flip := 1 << chance.randrange(8))
        # A flip of the version byte alone is damage too: the header's checksum covers it.
        with pytest.raises(ShardCorruptError):
            decode_trajectory(bytes(data))
        data[position] ^= flip
    assert_same(decode_trajectory(bytes(data)), trajectory(2, turns=2))


def test_every_cut_is_noticed() -> None:
    data = encode_trajectory(trajectory(2, turns=2))
    for length in range(len(data)):
        with pytest.raises(ShardCorruptError):
            decode_trajectory(data[:length])
    with pytest.raises(ShardCorruptError):
        decode_trajectory(data + b"\0")


def test_newer_major_format_is_refused_by_name() -> None:
    data = bytearray(encode_trajectory(trajectory(2)))
    header = parse_header(bytes(data))
    assert header is not None
    data[7] = 2
    end = header.header_bytes - 8
    data[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:end])))
    with pytest.raises(SchemaVersionError, match="shard format 2"):
        decode_trajectory(bytes(data))


def test_text_stays_compressed_until_asked_for() -> None:
    data = encode_trajectory(trajectory(3))
    header = parse_header(data)
    assert header is not None
    text = header.frame(FrameKind.TEXT)
    assert text.start + text.stored_bytes == header.record_bytes, "the text is the last frame"
    without = data[: text.start]
    record = read_record(header, without, text=False)
    assert record.calls
    assert all(call.messages == () and call.reply is None for call in record.calls)
    with pytest.raises(ShardCorruptError):
        open_frame(header, FrameKind.TEXT, without)


def test_log_probabilities_can_be_passed_over() -> None:
    data = encode_trajectory(trajectory(3))
    header = parse_header(data)
    assert header is not None
    raw = open_frame(header, FrameKind.TOKENS, data[: header.prefix_bytes([FrameKind.TOKENS])])
    tokens = trajectory(3).tokens
    ids, sampled, loss_mask = parse_tokens(raw, sum(map(len, tokens)))
    np.testing.assert_array_equal(ids, np.concatenate([part.ids for part in tokens]))
    np.testing.assert_array_equal(sampled, np.concatenate([part.sampled for part in tokens]))
    np.testing.assert_array_equal(loss_mask, np.concatenate([part.loss_mask for part in tokens]))


@seeded
@given(
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2**18), max_size=40),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_any_token_arrays_come_back_bit_for_bit(ids: list[int], chance: random.Random, strict: bool) -> None:
    """Also where a record breaks the invariants: a number for context, none for a sampled token."""
    sampled = np.array([chance.randrange(2) for _ in ids], np.uint8)
    logprobs = np.array([chance.uniform(-90, 0) for _ in ids], np.float32)
    for odd in (-np.inf, np.nan, -0.0, 0.0, np.finfo(np.float32).smallest_subnormal):
        if ids and chance.random() < 0.5:
            logprobs[chance.randrange(len(ids))] = odd
    if strict:
        logprobs[sampled == 0] = np.nan
    part = SegmentTokens(np.array(ids, np.uint32), sampled, sampled & 1, logprobs)
    back_ids, back_sampled, back_mask = parse_tokens(pack_tokens([part]), len(ids))
    np.testing.assert_array_equal(back_ids, part.ids)
    np.testing.assert_array_equal(back_sampled, part.sampled)
    np.testing.assert_array_equal(back_mask, part.loss_mask)
    back = parse_logprobs(pack_logprobs([part]), back_sampled)
    assert back.dtype == np.float32
    assert back.tobytes() == logprobs.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        back[:] = 0
    if ids:
        with pytest.raises(ShardCorruptError):
            parse_tokens(pack_tokens([part])[:-1], len(ids))
    if sampled.any():
        for raw in (b"", pack_logprobs([part])[:-1]):
            with pytest.raises(ShardCorruptError):
                parse_logprobs(raw, back_sampled)


def test_summary_says_what_the_record_says() -> None:
    timing = Timing(run=StageTiming(started_at=1.0, duration_s=2.5))
    original = trajectory(3, timing=timing, reward=None, stop_reason=StopReason.TIME_LIMIT)
    data = encode_trajectory(original)
    header = parse_header(data)
    assert header is not None
    summary, record = read_summary(header, data), original.record
    assert (summary.group_id, summary.group_size) == (record.group_id, record.group_size)
    assert (summary.run_s, summary.reward, summary.stop_reason) == (2.5, None, "time_limit")
    assert summary.lengths == tuple(map(len, original.tokens))
    assert summary.sampled == tuple(int(part.sampled.sum()) for part in original.tokens)
    assert summary.trained == tuple(int(part.loss_mask.sum()) for part in original.tokens)
    assert summary.weights == tuple(segment.weight for segment in record.segments)
    assert summary.oldest_version == min(
        run.version_low for segment in record.segments for run in segment.policy_runs
    )


@seeded
@given(st.text(), st.text(), st.floats(allow_nan=False), st.lists(st.integers(0, 2**32 - 1), max_size=3))
def test_any_summary_comes_back(task: str, lineage: str, reward: float, lengths: list[int]) -> None:
    many = tuple(lengths)
    summary = Summary(
        incarnation="w0",
        group_id="g",
        group_size=8,
        sample_index=7,
        task_id=task,
        status="completed",
        trainable=True,
        reward=reward,
        reward_valid=False,
        rollout_weight=0.1,
        policy_name="\ud800",
        lineage=lineage,
        lengths=many,
        weights=tuple(0.1 for _ in many),
        version_low=tuple(-1 for _ in many),
        version_high=tuple(2**40 for _ in many),
        trained=many,
        sampled=many,
    )
    assert parse_summary(pack_summary(summary)) == summary
    with pytest.raises(ShardCorruptError):
        parse_summary(pack_summary(summary)[:40])


def test_numbers_that_fit_no_field_are_refused_by_the_rollouts_name() -> None:
    with pytest.raises(ShardError, match=f"{SEGMENT}/4 cannot be stored"):
        encode_trajectory(trajectory(4, group_size=2**40))


def extended(original: Trajectory) -> Trajectory:
    """With optional columns: a number, an array and any number of values for each token."""
    chance = np.random.default_rng(0)
    lengths = [len(part) for part in original.tokens]
    counts = [chance.integers(0, 4, length).astype(np.uint32) for length in lengths]
    columns = {
        "ref_logprobs": tuple(chance.random(length, np.float32) for length in lengths),
        "routed_experts": tuple(chance.integers(0, 60, (n, 4, 2)).astype(np.uint8) for n in lengths),
        "kept_ids": tuple(
            Ragged(c, chance.integers(0, 2**31, int(c.sum())).astype(np.uint32)) for c in counts
        ),
    }
    return Trajectory(original.record, original.tokens, columns)


def test_optional_columns_come_back_and_are_read_by_name() -> None:
    original = extended(trajectory(6))
    data = encode_trajectory(original)
    decoded = decode_trajectory(data).extra_columns
    assert set(decoded) == set(original.extra_columns)
    for name, parts in original.extra_columns.items():
        for mine, theirs in zip(decoded[name], parts, strict=True):
            if isinstance(theirs, Ragged):
                assert isinstance(mine, Ragged)
                np.testing.assert_array_equal(mine.counts, theirs.counts)
                mine, theirs = mine.values, theirs.values
            assert not isinstance(mine, Ragged)
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(mine, theirs)
    header = parse_header(data)
    assert header is not None
    assert set(read_extra_columns(header, data, ["kept_ids", "no_such"])) == {"kept_ids"}


def test_readers_do_not_read_optional_columns_unless_asked(tmp_path: Path) -> None:
    run = ShardRun.create(tmp_path / "run")
    with run.writer("w0") as writer:
        writer.append(extended(trajectory(0)))
        writer.append(trajectory(1))
        writer.sync()
        for ordinal in (0, 1):
            run.confirm(ordinal, "w0")
    plain = open_run(run.paths.root).get(f"{SEGMENT}/0")
    with pytest.raises(ShardError, match="column extra was not read"):
        plain.extra_columns()
    assert not plain.trajectory().extra_columns
    with_extra, without = list(open_run(run.paths.root, columns=["tokens", "record", "text", "extra"]))
    assert set(with_extra.extra_columns(["ref_logprobs"])) == {"ref_logprobs"}
    assert set(with_extra.trajectory().extra_columns) == {"ref_logprobs", "routed_experts", "kept_ids"}
    assert without.extra_columns() == {}


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ((np.zeros(3, np.float32),), "do not match the segments' lengths"),
        ((np.zeros(7, object),), "numbers of one dtype"),
        ((Ragged(np.ones(7, np.uint32), np.zeros(6, np.uint8)),), "do not add up"),
        ((np.float32(1.0),), "do not match the segments' lengths"),
    ],
)
def test_optional_columns_of_a_wrong_shape_are_refused(column: ExtraColumn, why: str) -> None:
    original = trajectory(4)
    record = original.record.model_copy(
        update={"segments": (Segment(segment_index=0, length=7, weight=1.0),)}
    )
    part = SegmentTokens(
        np.zeros(7, np.uint32), np.zeros(7, np.uint8), np.zeros(7, np.uint8), np.full(7, np.nan, np.float32)
    )
    with pytest.raises(ShardError, match=f"{SEGMENT}/4 .*'wrong'.*{why}"):
        encode_trajectory(Trajectory(record, (part,), {"wrong": column}))


def test_frames_that_do_not_shrink_stand_as_they_are() -> None:
    noise = np.frombuffer(random.Random(0).randbytes(7 * 400), np.uint8).reshape(7, 400)
    original = trajectory(4)
    parts = tuple(np.resize(noise, (len(part), 400)) for part in original.tokens)
    data = encode_trajectory(Trajectory(original.record, original.tokens, {"noise": parts}))
    header = parse_header(data)
    assert header is not None
    for frame in header.frames:
        assert frame.stored_bytes <= frame.raw_bytes
    np.testing.assert_array_equal(decode_trajectory(data).extra_columns["noise"][0], parts[0])


def test_arrays_that_do_not_match_the_record_are_refused() -> None:
    original = trajectory(4)
    with pytest.raises(ShardError, match="do not match"):
        encode_trajectory(Trajectory(original.record, original.tokens[:-1]))


def test_foreign_rollout_ids_are_refused() -> None:
    original = trajectory(4)
    record = original.record.model_copy(update={"rollout_id": "seg/one"})
    with pytest.raises(ShardError, match="SEGMENT/ORDINAL"):
        encode_trajectory(Trajectory(record, original.tokens))


@seeded
@given(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**32 - 1)), max_size=5), st.integers(0, 63))
def test_marks_come_back_and_a_short_last_one_is_no_damage(places: list[tuple[int, int]], cut: int) -> None:
    marks = [RecordAddress(1, offset, 10, ref(ordinal), 2, 7) for offset, ordinal in places]
    data = b"".join(pack_mark(mark) for mark in marks)
    assert len(data) == ENTRY_BYTES * len(marks)
    assert parse_marks(data) == (marks, 0)
    assert parse_marks(data + b"\0" * cut) == (marks, 0)


def test_every_flipped_bit_of_a_mark_is_noticed() -> None:
    data = bytearray(pack_mark(RecordAddress(0, 128, 4096, ref(3), 1, 99)))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert parse_marks(bytes(data)) == ([], 1)
        data[bit // 8] ^= 1 << bit % 8
