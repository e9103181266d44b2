"""A record's bytes: what goes in comes out, and not one flipped or missing bit passes."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.contract import SegmentTokens, Trajectory
from hpcroll.errors import SchemaVersionError, ShardCorruptError, ShardError
from hpcroll.shards import decode_trajectory, encode_trajectory
from hpcroll.shards.format.codec import read_record
from hpcroll.shards.format.commit_log import ENTRY_BYTES, RecordAddress, pack_mark, parse_marks
from hpcroll.shards.format.frames import FrameKind, open_frame, parse_header
from hpcroll.testing.trajectories import random_trajectory
from tests.shard_runs import ref, trajectory

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
