"""A manifest segment: one submission as an immutable file.

Format: zstd (with content checksum) over JSON lines, ASCII; the first line is the header, each further
one a task in submission order. Rollout n is sample n % samples of task n // samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import zstandard
from pydantic import Field, ValidationError

from hpcroll.contract import Record, Rollout, RolloutRef, Task, sha256_hex
from hpcroll.errors import CorruptRecordError
from hpcroll.fs import read_fresh


class SegmentHeader(Record):
    """Everything of a submission but its tasks."""

    SCHEMA: ClassVar[str] = "1.1"

    key: str
    """The submission key; its hash names the segment."""
    samples: int = Field(ge=1)
    """Rollouts of each task."""
    tasks: int = Field(ge=1)
    sha256: str
    """Of samples and task lines: what makes two submissions the same."""
    submitted_at: float
    """Orders segments: Unix seconds on the submitter's node, but after every submission that it knew."""
    groups_before: int = Field(default=0, ge=0)
    """Groups of the submissions that the submitter knew: the least position of this one's first group."""
    submitter: str
    """user@host."""


def segment_name(key: str) -> str:
    """The name of the segment that submission key `key` stands for."""
    return sha256_hex(key.encode())[:16]


def content_digest(samples: int, lines: Sequence[str]) -> str:
    """SHA-256 (hex) of what is submitted, without who and when."""
    return sha256_hex("\n".join([str(samples), *lines]).encode())


def encode_segment(header: SegmentHeader, lines: Sequence[str]) -> bytes:
    """The bytes of a segment file."""
    text = "\n".join([header.to_json(), *lines]) + "\n"
    return zstandard.ZstdCompressor(level=6, write_checksum=True).compress(text.encode("ascii"))


@dataclass(frozen=True, eq=False)
class Segment:
    """One submission, as read back; its tasks are parsed when they are asked for."""

    name: str
    header: SegmentHeader
    lines: tuple[str, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """How many rollouts it has."""
        return self.header.tasks * self.header.samples

    @property
    def samples(self) -> int:
        return self.header.samples

    @property
    def key(self) -> str:
        return self.header.key

    @property
    def submitted_at(self) -> float:
        return self.header.submitted_at

    @cached_property
    def _task_indexes(self) -> dict[str, int]:
        return {self.task(index).task_id: index for index in range(self.header.tasks)}

    def task(self, index: int) -> Task:
        """The `index`-th task."""
        return Task.from_json(self.lines[index])

    def task_index(self, task_id: str) -> int:
        """The place of the task named `task_id`; raises `KeyError`. Parses every task the first time."""
        return self._task_indexes[task_id]

    def ref(self, ordinal: int) -> RolloutRef:
        return RolloutRef(segment=self.name, ordinal=ordinal)

    def refs(self) -> tuple[RolloutRef, ...]:
        """Every rollout, in order."""
        return tuple(self.ref(ordinal) for ordinal in range(self.size))

    def rollout(self, ordinal: int) -> Rollout:
        """The `ordinal`-th rollout; raises `IndexError` past the end."""
        if not 0 <= ordinal < self.size:
            raise IndexError(f"segment {self.name} has rollouts 0 to {self.size - 1}, not {ordinal}")
        return Rollout(
            ref=self.ref(ordinal),
            task=self.task(ordinal // self.samples),
            sample_index=ordinal % self.samples,
            group_size=self.samples,
        )


def read_segment(path: Path) -> Segment | None:
    """The segment in file `path`, checked against its digest; None where there is no such file.

    Raises `CorruptRecordError`, or `SchemaVersionError` for one of a newer major version.
    """
    data = read_fresh(path)
    if data is None:
        return None
    try:
        # In one go: a stream would take a frame that was cut short for a whole one.
        first, *lines = zstandard.ZstdDecompressor().decompress(data).decode("ascii").split("\n")[:-1]
        header = SegmentHeader.from_json(first)
    except (zstandard.ZstdError, ValidationError, ValueError) as error:
        raise CorruptRecordError(f"manifest segment {path} is damaged: {error}") from error
    if len(lines) != header.tasks or content_digest(header.samples, lines) != header.sha256:
        raise CorruptRecordError(
            f"manifest segment {path} holds {len(lines)} of {header.tasks} tasks, or other ones than its "
            "digest says; restore the file: its rollouts cannot be told apart without it"
        )
    return Segment(name=path.name.partition(".")[0], header=header, lines=tuple(lines))
