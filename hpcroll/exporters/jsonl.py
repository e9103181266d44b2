"""JSON lines: one rollout a line, its whole record and its token arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from hpcroll.config import Strict
from hpcroll.contract import SegmentTokens
from hpcroll.exporters.base import Fact, Part, Unit
from hpcroll.exporters.json_text import json_text
from hpcroll.shards import Column, StoredTrajectory


class JsonlOptions(Strict):
    """Options of the format `jsonl`."""

    tokens: bool = True
    """Write the token arrays, too."""
    text: bool = True
    """Write messages and replies, too."""


class Jsonl:
    """`part-<number>.jsonl`: per line the record as `hpcroll show --json --tokens` prints it.

    `tokens[i]` are the arrays of `segments[i]`; log-probabilities are null where nothing was sampled. ASCII
    only: text that no UTF-8 can hold (half a surrogate pair) stays what it was.
    """

    Options: ClassVar[type[Strict]] = JsonlOptions
    loses: ClassVar[tuple[Fact, ...]] = ()
    source: ClassVar[str] = "hpcroll's own: docs/reference/trajectory.md"
    columns: ClassVar[frozenset[Column]] = frozenset(Column)
    unit: ClassVar[Unit] = Unit.ROLLOUT
    groups_per_part: int | None = None

    def __init__(self, options: JsonlOptions) -> None:
        self._options = options

    def names(self, number: int) -> tuple[str, ...]:
        return (f"part-{number:05d}.jsonl",)

    def files(self, part: Part) -> Iterator[tuple[str, bytes]]:
        lines = [json_text(self._line(member)) for member in part.members]
        yield self.names(part.number)[0], "".join(f"{line}\n" for line in lines).encode()

    def _line(self, stored: StoredTrajectory) -> dict[str, Any]:
        record = stored.record.model_dump(mode="json")
        if not self._options.text:
            for call in record["calls"]:
                del call["messages"], call["reply"]
        if self._options.tokens:
            record["tokens"] = [_arrays(tokens) for tokens in stored.tokens]
        return record


def _arrays(tokens: SegmentTokens) -> dict[str, list[Any]]:
    return {
        "ids": tokens.ids.tolist(),
        "sampled": tokens.sampled.tolist(),
        "loss_mask": tokens.loss_mask.tolist(),
        "logprobs": [None if np.isnan(value) else value for value in tokens.logprobs.tolist()],
    }
