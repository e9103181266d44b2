"""What a set of trajectories is like: figures by which an imagined set and a captured one can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from hpcroll.contract import Ids, Trajectory

_WINDOW = 16
"""Ids in a row that count as the same passage."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
LEVEL = 3


@dataclass(frozen=True)
class Statistics:
    """Shares are of 0 to 1; ratios are those of zstd at level 3, raw by compressed."""

    trajectories: int
    tokens: tuple[int, int, int]
    """Of one trajectory: fewest, median, most."""
    turns: tuple[int, int, int]
    sampled: float
    """Share of tokens that a policy sampled."""
    siblings: float
    """Share of passages of 16 ids that an earlier sibling has too; the first of a group is left out."""
    itself: float
    """Share of passages that stand earlier in the same trajectory."""
    frequent: float
    """Share of tokens that are one of the hundred most frequent ids."""
    text_bytes: float
    """Bytes of the record's JSON for each token."""
    certain: float
    """Share of sampled tokens with a probability over 0.99."""
    surprising: float
    """Share of sampled tokens with a probability under 0.1."""
    ids_ratio: tuple[float, float]
    """One trajectory at a time, and a group at a time."""
    text_ratio: tuple[float, float]

    def rows(self) -> Iterable[tuple[str, str]]:
        """Name and value of each figure, for people."""
        yield "trajectories", f"{self.trajectories}"
        yield "tokens of one: fewest, median, most", "{}, {}, {}".format(*self.tokens)
        yield "turns of one: fewest, median, most", "{}, {}, {}".format(*self.turns)
        yield "tokens sampled", f"{self.sampled:.0%}"
        yield "passages that an earlier sibling has", f"{self.siblings:.0%}"
        yield "passages that the same one has earlier", f"{self.itself:.0%}"
        yield "tokens among the 100 most frequent ids", f"{self.frequent:.0%}"
        yield "bytes of record a token", f"{self.text_bytes:.1f}"
        yield "sampled with probability > 0.99, < 0.1", f"{self.certain:.0%}, {self.surprising:.0%}"
        yield "ids, zstd alone and by group", "{:.1f}, {:.1f}".format(*self.ids_ratio)
        yield "record, zstd alone and by group", "{:.1f}, {:.1f}".format(*self.text_ratio)


def describe(trajectories: Iterable[Trajectory]) -> Statistics:
    """The figures of `trajectories`, in any order."""
    by_group: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_group[trajectory.record.group_id].append(trajectory)
    groups = list(by_group.values())
    every = [trajectory for group in groups for trajectory in group]
    ids = [[_joined(trajectory) for trajectory in group] for group in groups]
    texts = [[trajectory.record.to_json().encode() for trajectory in group] for group in groups]
    tokens = sorted(len(one) for group in ids for one in group)
    turns = sorted(len(trajectory.record.calls) for trajectory in every)
    counts = np.sort(np.bincount(np.concatenate([one for group in ids for one in group])))[::-1]
    logprobs = np.concatenate([part.logprobs[part.sampled == 1] for one in every for part in one.tokens])
    siblings, itself = _repeats(ids)
    return Statistics(
        trajectories=len(every),
        tokens=(tokens[0], tokens[len(tokens) // 2], tokens[-1]),
        turns=(turns[0], turns[len(turns) // 2], turns[-1]),
        sampled=len(logprobs) / sum(tokens),
        siblings=siblings,
        itself=itself,
        frequent=float(counts[:100].sum() / counts.sum()),
        text_bytes=sum(len(text) for group in texts for text in group) / sum(tokens),
        certain=float((logprobs > np.log(0.99)).mean()),
        surprising=float((logprobs < np.log(0.1)).mean()),
        ids_ratio=_ratios([[one.tobytes() for one in group] for group in ids]),
        text_ratio=_ratios(texts),
    )


def _joined(trajectory: Trajectory) -> Ids:
    return np.concatenate([part.ids for part in trajectory.tokens])


def _passages(ids: Ids) -> NDArray[np.uint64]:
    """A hash of each run of 16 ids, at every place."""
    wide = ids.astype(np.uint64) + np.uint64(1)
    found = np.zeros(max(0, len(ids) - _WINDOW + 1), np.uint64)
    for step in range(_WINDOW):
        found = found * _FACTOR + wide[step : step + len(found)]
    return found


def _repeats(groups: Sequence[Sequence[Ids]]) -> tuple[float, float]:
    among, within, compared, counted = 0, 0, 0, 0
    for group in groups:
        seen = np.empty(0, np.uint64)
        for number, ids in enumerate(group):
            passages = _passages(ids)
            unique, first = np.unique(passages, return_index=True)
            within += len(passages) - len(first)
            counted += len(passages)
            if number:
                among += int(np.isin(passages, seen).sum())
                compared += len(passages)
            seen = np.union1d(seen, unique)
    return among / max(1, compared), within / max(1, counted)


def _ratios(groups: Sequence[Sequence[bytes]]) -> tuple[float, float]:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    raw = sum(len(data) for group in groups for data in group)
    alone = sum(len(compressor.compress(data)) for group in groups for data in group)
    together = sum(len(compressor.compress(b"".join(group))) for group in groups)
    return raw / alone, raw / together
