"""The log of the scripted server against the record: what was sampled stands there, once, in its context.

Nothing here uses what made the record: two lists of calls are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcroll.contract import Trajectory

CallKey = tuple[tuple[int, ...], tuple[int, ...], bytes, int, int]
"""Prompt ids, sampled ids, log-probabilities (float32), lowest and highest policy version."""


@dataclass(frozen=True)
class Told:
    """What the server logged of one session, reply by reply."""

    entries: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> int:
        return sum(len(entry["sampled_ids"]) for entry in self.entries)

    def keys(self) -> Counter[CallKey]:
        return Counter(
            (
                tuple(entry["prompt_ids"]),
                tuple(entry["sampled_ids"]),
                np.array(entry["logprobs"], np.float32).tobytes(),
                entry["version"],
                entry["version_end"],
            )
            for entry in self.entries
        )


def told(log: Path, session: str) -> Told:
    """The log's entries of `session` (`ROLLOUT.ATTEMPT`); none where it made no call."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    entries = map(json.loads, lines)
    return Told(tuple(entry for entry in entries if entry["session"] == session))


def recorded(trajectory: Trajectory) -> Counter[CallKey]:
    """The calls of a record, each with its context as its segment has it."""
    return Counter(_key(trajectory, index) for index in range(len(trajectory.record.call_spans)))


def _key(trajectory: Trajectory, index: int) -> CallKey:
    span = trajectory.record.call_spans[index]
    arrays = trajectory.tokens[span.segment_index]
    stop = span.start + span.length
    versions = _versions(trajectory, span.segment_index)[span.start : stop]
    return (
        tuple(arrays.ids[: span.start].tolist()),
        tuple(arrays.ids[span.start : stop].tolist()),
        arrays.logprobs[span.start : stop].tobytes(),
        min(low for low, _ in versions),
        max(high for _, high in versions),
    )


def _versions(trajectory: Trajectory, segment_index: int) -> list[tuple[int, int]]:
    segment = trajectory.record.segments[segment_index]
    versions = [(-1, -1)] * segment.length
    for run in segment.policy_runs:
        versions[run.start : run.start + run.length] = [(run.version_low, run.version_high)] * run.length
    return versions


def assert_same(told_calls: Told, trajectory: Trajectory, *, refused: int = 0) -> None:
    """Every reply of the server stands in the record exactly once, with its prompt before it.

    For sessions in which every reply of the server reached its client whole, but for `refused` calls that
    it gave none; each of them is a gap.
    """
    record = trajectory.record
    assert {entry["ended"] for entry in told_calls.entries} == {"done"}
    assert record.dropped == ()
    assert len(record.gaps) == refused, record.gaps
    said, found = told_calls.keys(), recorded(trajectory)
    missing, extra = said - found, found - said
    assert not missing, [_brief(key) for key in missing]
    assert not extra, [_brief(key) for key in extra]
    assert sum(int(arrays.sampled.sum()) for arrays in trajectory.tokens) == told_calls.tokens
    if found:
        _assert_it_can_fail(found, said)


def _assert_it_can_fail(found: Counter[CallKey], said: Counter[CallKey]) -> None:
    prompt, sampled, logprobs, low, high = next(key for key in found if key[1])
    nudged = np.nextafter(np.frombuffer(logprobs, np.float32), np.float32(1)).tobytes()
    for other in (
        ((*prompt[:-1], prompt[-1] ^ 1), sampled, logprobs, low, high),
        (prompt, (*sampled[:-1], sampled[-1] ^ 1), logprobs, low, high),
        (prompt, sampled, nudged, low, high),
        (prompt, sampled, logprobs, low, high + 1),
    ):
        assert other not in said


def _brief(key: CallKey) -> str:
    prompt, sampled, _, low, high = key
    return f"{len(prompt)} prompt ids, {len(sampled)} sampled {list(sampled[:8])}, versions {low}-{high}"


def share_noncanonical(entries: Sequence[dict[str, Any]]) -> float:
    """Share of the script's own replies that were tokenised otherwise than their text encodes."""
    main = [entry for entry in entries if entry["kind"] == "main"]
    return sum(not entry["canonical"] for entry in main) / len(main)
