"""A trajectory as the columns of a record, and back."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpcroll.contract import ExtraColumn, RolloutRef, SegmentTokens, Trajectory
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.shards.format.columns import column_frames, read_columns
from hpcroll.shards.format.dictionaries import Dictionary
from hpcroll.shards.format.frames import FrameKind, Header, is_sound, join_frames, open_frame, parse_header
from hpcroll.shards.format.summary import Summary, pack_summary, parse_summary
from hpcroll.shards.format.token_bytes import pack_logprobs, pack_tokens, parse_logprobs, parse_tokens

if TYPE_CHECKING:
    from hpcroll.contract import TrajectoryRecord

__all__ = [
    "Summary",
    "decode_trajectory",
    "encode_frames",
    "encode_trajectory",
    "raw_frames",
    "read_extra_columns",
    "read_record",
    "read_summary",
    "read_tokens",
    "read_trajectory",
]


def encode_trajectory(trajectory: Trajectory, *, level: int = 3) -> bytes:
    """`trajectory` as one self-contained record; `level` is zstd's.

    Raises `ShardError` where the rollout id is not SEGMENT/ORDINAL or the arrays do not match the record.
    """
    return encode_frames(trajectory, raw_frames(trajectory), level=level)


def encode_frames(
    trajectory: Trajectory,
    frames: Mapping[int, bytes],
    *,
    level: int,
    dictionaries: Mapping[int, Dictionary] | None = None,
) -> bytes:
    """The record of `raw_frames(trajectory)`, as it stands in a shard of a run with these dictionaries."""
    record = trajectory.record
    return join_frames(_ref(record), record.attempt, frames, level=level, dictionaries=dictionaries)


def raw_frames(trajectory: Trajectory) -> dict[int, bytes]:
    """The frames of a record by kind, not yet compressed; raises what `encode_trajectory` raises."""
    from hpcroll.shards.format.record_json import record_bytes, text_bytes

    record, tokens = trajectory.record, trajectory.tokens
    _ref(record)
    lengths = [segment.length for segment in record.segments]
    if any([len(getattr(part, name)) for part in tokens] != lengths for name in _ARRAYS):
        raise ShardError(f"rollout {record.rollout_id}: its token arrays do not match its segments' lengths")
    try:
        return {
            FrameKind.SUMMARY: pack_summary(_summary(trajectory)),
            FrameKind.TOKENS: pack_tokens(tokens),
            FrameKind.LOGPROBS: pack_logprobs(tokens),
            FrameKind.RECORD: record_bytes(record),
            FrameKind.TEXT: text_bytes(record),
            **column_frames(trajectory.extra_columns, lengths),
        }
    except (struct.error, ShardError) as error:
        raise ShardError(f"rollout {record.rollout_id} cannot be stored: {error}") from error


def decode_trajectory(data: bytes) -> Trajectory:
    """The trajectory of one record's bytes; raises `ShardCorruptError` unless every byte is as written."""
    return read_trajectory(parse_header(data), data)


def read_trajectory(header: Header | None, data: bytes) -> Trajectory:
    """The trajectory of the record `data`, whose header may know the dictionaries of its run.

    Raises `ShardCorruptError` unless every byte is as written, `ShardError` where a dictionary is missing.
    """
    if header is None or header.record_bytes != len(data) or not is_sound(header, data):
        raise ShardCorruptError(
            f"{len(data)} bytes are not one whole trajectory record: they are cut short or damaged"
        )
    return Trajectory(
        read_record(header, data, text=True),
        read_tokens(header, read_summary(header, data), data),
        read_extra_columns(header, data),
    )


def read_summary(header: Header, data: bytes) -> Summary:
    """The summary column of a record."""
    return parse_summary(bytes(open_frame(header, FrameKind.SUMMARY, data)))


def read_tokens(header: Header, summary: Summary, data: bytes) -> tuple[SegmentTokens, ...]:
    """The token columns, one per segment: read-only views of one array each."""
    raw = open_frame(header, FrameKind.TOKENS, data)
    raw_logprobs = open_frame(header, FrameKind.LOGPROBS, data)
    try:
        ids, sampled, loss_mask = parse_tokens(raw, sum(summary.lengths))
        logprobs = parse_logprobs(raw_logprobs, sampled)
    except ShardCorruptError as error:
        raise ShardCorruptError(f"rollout {header.ref}: {error}") from error
    found, start = [], 0
    for length in summary.lengths:
        own = slice(start, start := start + length)
        found.append(SegmentTokens(ids[own], sampled[own], loss_mask[own], logprobs[own]))
    return tuple(found)


def read_record(header: Header, data: bytes, *, text: bool) -> TrajectoryRecord:
    """The record; its calls have messages and replies only with `text`, which decompresses that column."""
    from hpcroll.shards.format.record_json import parse_record

    raw = open_frame(header, FrameKind.RECORD, data)
    return parse_record(raw, open_frame(header, FrameKind.TEXT, data) if text else None)


def read_extra_columns(
    header: Header, data: bytes, names: Collection[str] | None = None
) -> dict[str, ExtraColumn]:
    """The optional columns `names` (None: all) that the record has: read-only, one array per segment."""
    directory = None
    if header.find(FrameKind.COLUMNS) is not None:
        directory = open_frame(header, FrameKind.COLUMNS, data)
    return read_columns(directory, lambda kind: open_frame(header, kind, data), names)


_ARRAYS = tuple(SegmentTokens.__dataclass_fields__)


def _ref(record: TrajectoryRecord) -> RolloutRef:
    try:
        return RolloutRef.parse(record.rollout_id)
    except ValueError as error:
        raise ShardError(f"rollout {record.rollout_id!r} cannot be stored: {error}") from error


def _summary(trajectory: Trajectory) -> Summary:
    record = trajectory.record
    runs = [segment.policy_runs for segment in record.segments]
    first = next((run for segment in runs for run in segment), None)
    return Summary(
        incarnation=record.incarnation,
        group_id=record.group_id,
        group_size=record.group_size,
        sample_index=record.sample_index,
        task_id=record.task_id,
        status=record.status,
        trainable=record.trainable,
        reward=record.reward,
        reward_valid=record.reward_valid,
        rollout_weight=record.rollout_weight,
        policy_name=first.policy_name if first else "",
        lineage=first.lineage if first else "",
        lengths=tuple(segment.length for segment in record.segments),
        weights=tuple(segment.weight for segment in record.segments),
        version_low=tuple(min((run.version_low for run in segment), default=-1) for segment in runs),
        version_high=tuple(max((run.version_high for run in segment), default=-1) for segment in runs),
        trained=tuple(int(np.count_nonzero(tokens.loss_mask)) for tokens in trajectory.tokens),
        sampled=tuple(int(np.count_nonzero(tokens.sampled)) for tokens in trajectory.tokens),
        stop_reason=record.stop_reason,
        run_s=record.timing.run.duration_s if record.timing.run is not None else None,
    )
