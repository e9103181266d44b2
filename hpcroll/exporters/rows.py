"""Rows: one per segment that is trained on, with what trainers want of each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpcroll.contract import Floats, Segment, SegmentTokens, TrajectoryRecord
from hpcroll.exporters.base import Part
from hpcroll.shards import StoredTrajectory

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Row:
    """One trained segment of a usable rollout."""

    rollout: StoredTrajectory
    segment_index: int
    is_last: bool
    """Whether it is the last row of its rollout."""
    tokens: SegmentTokens
    advantage: float

    @property
    def reward(self) -> float:
        reward = self.rollout.reward
        assert reward is not None  # usable rollouts have a valid one
        return reward

    @property
    def weight(self) -> float:
        """The segment's share of its rollout's weight."""
        return self.rollout.summary.weights[self.segment_index]

    @property
    def segment(self) -> Segment:
        return self.rollout.record.segments[self.segment_index]

    @property
    def prompt_length(self) -> int:
        """How many context tokens stand before the first sampled one."""
        return int(np.argmax(self.tokens.sampled))

    def __len__(self) -> int:
        return len(self.tokens)


def training_rows(part: Part, *, normalise_std: bool) -> Iterator[Row]:
    """The rows of a part: rollouts without a valid reward or not trainable have none, nor have segments
    without a token to train on."""
    for group in part.groups:
        usable = [member for member in group.members if member.summary.usable]
        advantages = group_advantages(usable, normalise_std=normalise_std)
        for member, advantage in zip(usable, advantages, strict=True):
            trained = [i for i, tokens in enumerate(member.tokens) if tokens.loss_mask.any()]
            for index in trained:
                yield Row(member, index, index == trained[-1], member.tokens[index], advantage)


def group_advantages(usable: Sequence[StoredTrajectory], *, normalise_std: bool) -> list[float]:
    """Reward minus the group's mean, as GRPO defines it, over its usable rollouts; each rollout counts once.

    With `normalise_std` divided by the standard deviation (n - 1) plus 1e-6. A group of one has 0.0.
    """
    rewards = np.array([member.reward for member in usable], np.float64)
    centred = rewards - rewards.mean() if len(rewards) else rewards
    if normalise_std and len(rewards) > 1:
        centred = centred / (rewards.std(ddof=1) + _STD_EPSILON)
    return [float(value) for value in centred]


def filled_logprobs(tokens: SegmentTokens) -> Floats:
    """Log-probabilities, float32 (T,), with 0.0 in place of NaN where nothing was sampled."""
    return np.where(tokens.sampled != 0, tokens.logprobs, np.float32(0.0)).astype(np.float32)


def token_versions(segment: Segment) -> NDArray[np.int32]:
    """The policy version of each token, int32 (T,): the oldest it may be of, -1 for context."""
    versions = np.full(segment.length, -1, np.int32)
    for run in segment.policy_runs:
        versions[run.start : run.start + run.length] = run.version_low
    return versions


def token_temperatures(record: TrajectoryRecord, segment_index: int) -> Floats:
    """The temperature that each token was sampled at, float32 (T,).

    1.0 for context and where nobody set one; 1.0 also where it was 0 (greedy), which no logits can be divided
    by.
    """
    temperatures = np.ones(record.segments[segment_index].length, np.float32)
    calls = {call.call_index: call for call in record.calls}
    for span in record.call_spans:
        if span.segment_index == segment_index:
            asked = calls[span.call_index].sampling_effective.temperature
            temperatures[span.start : span.start + span.length] = asked or 1.0
    return temperatures


def stable_number(text: str) -> int:
    """A number of 63 bits that stands for `text`, the same everywhere, for formats that number things."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) >> 1
