"""A trajectory as the columns of a record, and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcroll.contract import RolloutRef, SegmentTokens, Trajectory
from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.shards.format.frames import FrameKind, Header, is_sound, join_frames, open_frame, parse_header

if TYPE_CHECKING:
    from hpcroll.contract import TrajectoryRecord

_BYTES_PER_TOKEN = 4 + 4 + 1 + 1


@dataclass(frozen=True, slots=True)
class Summary:
    """What filters, grouping and packing need of a record, without reading its other columns.

    The lists have one entry per segment. `version_low` and `version_high` bound the policy versions of
    its sampled tokens, -1 where it has none; `trained` counts the tokens of its loss mask, and is empty in
    records that do not say.
    """

    incarnation: str
    group_id: str
    group_size: int
    sample_index: int
    task_id: str
    status: str
    trainable: bool
    reward: float | None
    reward_valid: bool
    rollout_weight: float
    policy_name: str
    lineage: str
    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    version_low: tuple[int, ...]
    version_high: tuple[int, ...]
    trained: tuple[int, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a trainer can use the rollout: it is trainable and its reward is valid."""
        return self.trainable and self.reward_valid

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version that sampled a token; None where none was sampled."""
        return min((version for version in self.version_low if version >= 0), default=None)


def encode_trajectory(trajectory: Trajectory, *, level: int = 3) -> bytes:
    """`trajectory` as one self-contained record, as it stands in a shard; `level` is zstd's.

    Raises `ShardError` where the rollout id is not SEGMENT/ORDINAL or the arrays do not match the record.
    """
    record = trajectory.record
    try:
        ref = RolloutRef.parse(record.rollout_id)
    except ValueError as error:
        raise ShardError(f"rollout {record.rollout_id!r} cannot be stored: {error}") from error
    from hpcroll.shards.format.record_json import record_bytes, text_bytes

    frames = {
        FrameKind.SUMMARY: json.dumps(asdict(_summary(trajectory)), separators=(",", ":")).encode(),
        FrameKind.TOKENS: _tokens_bytes(trajectory),
        FrameKind.RECORD: record_bytes(record),
        FrameKind.TEXT: text_bytes(record),
    }
    return join_frames(ref, record.attempt, frames, level=level)


def decode_trajectory(data: bytes) -> Trajectory:
    """The trajectory of one record's bytes; raises `ShardCorruptError` unless every byte is as written."""
    header = parse_header(data)
    if header is None or header.record_bytes != len(data) or not is_sound(header, data):
        raise ShardCorruptError(
            f"{len(data)} bytes are not one whole trajectory record: they are cut short or damaged"
        )
    summary = read_summary(header, data)
    return Trajectory(read_record(header, data, text=True), read_tokens(header, summary, data))


def read_summary(header: Header, data: bytes) -> Summary:
    """The summary column of a record."""
    fields: dict[str, Any] = json.loads(open_frame(header, FrameKind.SUMMARY, data))
    fields.setdefault("trained", ())
    known = ((name, fields[name]) for name in Summary.__dataclass_fields__)
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known}
    return Summary(**values)


def read_tokens(header: Header, summary: Summary, data: bytes) -> tuple[SegmentTokens, ...]:
    """The token columns, one per segment: read-only views of one decompressed buffer."""
    raw = open_frame(header, FrameKind.TOKENS, data)
    total = sum(summary.lengths)
    if len(raw) != total * _BYTES_PER_TOKEN:
        raise ShardCorruptError(f"rollout {header.ref}: {len(raw)} token bytes for {total} tokens")
    ids = np.frombuffer(raw, "<u4", total)
    logprobs = np.frombuffer(raw, "<f4", total, 4 * total)
    sampled = np.frombuffer(raw, np.uint8, total, 8 * total)
    loss_mask = np.frombuffer(raw, np.uint8, total, 9 * total)
    ends = np.cumsum(summary.lengths, dtype=np.int64)
    spans = [slice(int(end) - length, int(end)) for end, length in zip(ends, summary.lengths, strict=True)]
    return tuple(SegmentTokens(ids[s], sampled[s], loss_mask[s], logprobs[s]) for s in spans)


def read_record(header: Header, data: bytes, *, text: bool) -> TrajectoryRecord:
    """The record; its calls have messages and replies only with `text`, which decompresses that column."""
    from hpcroll.shards.format.record_json import parse_record

    raw = open_frame(header, FrameKind.RECORD, data)
    return parse_record(raw, open_frame(header, FrameKind.TEXT, data) if text else None)


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
    )


def _tokens_bytes(trajectory: Trajectory) -> bytes:
    record, tokens = trajectory.record, trajectory.tokens
    columns = (
        (np.dtype("<u4"), [arrays.ids for arrays in tokens]),
        (np.dtype("<f4"), [arrays.logprobs for arrays in tokens]),
        (np.dtype("u1"), [arrays.sampled for arrays in tokens]),
        (np.dtype("u1"), [arrays.loss_mask for arrays in tokens]),
    )
    lengths = [segment.length for segment in record.segments]
    if any([len(part) for part in parts] != lengths for _, parts in columns):
        raise ShardError(f"rollout {record.rollout_id}: its token arrays do not match its segments' lengths")
    return b"".join(np.ascontiguousarray(part, dtype).tobytes() for dtype, parts in columns for part in parts)
