"""The summary of a record: what filters, groups, plans and packs need, as fixed binary columns.

Layout, little-endian (docs/reference/shard-format.md); each of the three parts may grow at its end in a newer
minor version, and a reader takes of it what it knows:

    H fixed bytes, H bytes per segment, I segments, H strings, H flags, I group size, I sample index,
    d reward, d rollout weight, d run seconds
    per segment:  I length, I sampled tokens, I trained tokens, d weight, q version low, q version high
    I byte length of each string, then the strings, UTF-8: incarnation, group, task, status, stop reason,
    policy name, lineage
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from hpcroll.errors import ShardCorruptError

_FIXED = struct.Struct("<HHIHHIIddd")
_SEGMENT = struct.Struct("<IIIdqq")
_STRINGS = 7
_SIZES = struct.Struct(f"<{_STRINGS}I")
_TRAINABLE, _REWARD_VALID, _HAS_REWARD, _HAS_RUN = 1, 2, 4, 8


class Summary(NamedTuple):
    """What filters, grouping, plans and packing need of a record, without reading its other columns.

    `run_s` is how long the agent ran, in seconds, None where it did not. The tuples have one entry per
    segment: `lengths` in tokens; `weights`; `version_low` and `version_high` bound the policy versions of its
    sampled tokens, -1 where it has none; `sampled` counts those, and `trained` the tokens of its loss mask.
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
    sampled: tuple[int, ...] = ()
    stop_reason: str = ""
    run_s: float | None = None

    @property
    def usable(self) -> bool:
        """Whether a trainer can use the rollout: it is trainable and its reward is valid."""
        return self.trainable and self.reward_valid

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version that sampled a token; None where none was sampled."""
        return min((version for version in self.version_low if version >= 0), default=None)


def pack_summary(summary: Summary) -> bytes:
    """The bytes of `summary`; raises `struct.error` where a number does not fit its field."""
    texts = (
        summary.incarnation,
        summary.group_id,
        summary.task_id,
        summary.status,
        summary.stop_reason,
        summary.policy_name,
        summary.lineage,
    )
    strings = [text.encode("utf-8", "surrogatepass") for text in texts]
    flags = (
        summary.trainable * _TRAINABLE
        + summary.reward_valid * _REWARD_VALID
        + (summary.reward is not None) * _HAS_REWARD
        + (summary.run_s is not None) * _HAS_RUN
    )
    fixed = _FIXED.pack(
        _FIXED.size,
        _SEGMENT.size,
        len(summary.lengths),
        _STRINGS,
        flags,
        summary.group_size,
        summary.sample_index,
        summary.reward if summary.reward is not None else 0.0,
        summary.rollout_weight,
        summary.run_s if summary.run_s is not None else 0.0,
    )
    segments = zip(
        summary.lengths,
        summary.sampled,
        summary.trained,
        summary.weights,
        summary.version_low,
        summary.version_high,
        strict=True,
    )
    return b"".join(
        [
            fixed,
            *(_SEGMENT.pack(*segment) for segment in segments),
            _SIZES.pack(*map(len, strings)),
            *strings,
        ]
    )


def parse_summary(raw: bytes) -> Summary:
    """The summary of `pack_summary`'s bytes; raises `ShardCorruptError` where they are none."""
    try:
        return _parse(raw)
    except (struct.error, ValueError) as error:
        raise ShardCorruptError(f"the summary of a record is none: {error}") from error


def _parse(raw: bytes) -> Summary:
    fixed_bytes, segment_bytes, count, strings, flags, group_size, sample_index, reward, weight, run_s = (
        _FIXED.unpack_from(raw)
    )
    if fixed_bytes < _FIXED.size or segment_bytes < _SEGMENT.size or strings < _STRINGS:
        raise ValueError(f"parts of {fixed_bytes}, {segment_bytes} bytes and {strings} strings are too small")
    segments_end = fixed_bytes + count * segment_bytes
    rows = [_SEGMENT.unpack_from(raw, at) for at in range(fixed_bytes, segments_end, segment_bytes)]
    lengths, sampled, trained, weights, low, high = zip(*rows, strict=True) if rows else ((),) * 6
    texts, start = [], segments_end + 4 * strings
    for size in _SIZES.unpack_from(raw, segments_end):
        texts.append(raw[start : start + size].decode("utf-8", "surrogatepass"))
        start += size
    incarnation, group_id, task_id, status, stop_reason, policy_name, lineage = texts
    return Summary(
        incarnation,
        group_id,
        group_size,
        sample_index,
        task_id,
        status,
        bool(flags & _TRAINABLE),
        reward if flags & _HAS_REWARD else None,
        bool(flags & _REWARD_VALID),
        weight,
        policy_name,
        lineage,
        lengths,
        weights,
        low,
        high,
        trained,
        sampled,
        stop_reason,
        run_s if flags & _HAS_RUN else None,
    )
