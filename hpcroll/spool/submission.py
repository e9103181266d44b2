"""Submits tasks: idempotent by key, visible only when all of it is durable."""

from __future__ import annotations

import getpass
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpcroll.contract import RolloutRef, Task
from hpcroll.errors import ConfigError, SpoolError
from hpcroll.fs import RunPaths, make_directories, publish
from hpcroll.spool.manifest import (
    Segment,
    SegmentHeader,
    content_digest,
    encode_segment,
    read_segment,
    segment_name,
)


@dataclass(frozen=True)
class Submission:
    """What a submission key stands for."""

    segment: Segment
    created: bool
    """False where the same had been submitted before."""

    @property
    def key(self) -> str:
        return self.segment.key

    @property
    def refs(self) -> tuple[RolloutRef, ...]:
        """Its rollouts, in order."""
        return self.segment.refs()


def submit(
    paths: RunPaths,
    legs: Sequence[str],
    tasks: Sequence[Task],
    *,
    samples: int,
    key: str,
    earlier: Sequence[Segment] = (),
) -> Submission:
    """Submits `samples` rollouts of each of `tasks`; durable and visible to workers on return.

    `earlier`: the submissions that the caller knows, in order. This one stands behind them, also where its
    node's clock is slow.

    The same key with the same content is one submission, however often it is sent. Raises `ConfigError`
    where the key stands for other content, or for arguments that make no submission; nothing is visible
    then.
    """
    lines = _checked_lines(tasks, samples, key)
    digest = content_digest(samples, lines)
    name = segment_name(key)
    path = paths.segment_file(name)
    present = read_segment(path)
    if present is not None:
        return _same(present, digest, key)
    header = SegmentHeader(
        key=key,
        samples=samples,
        tasks=len(lines),
        sha256=digest,
        submitted_at=max([time.time(), *(math.nextafter(one.submitted_at, math.inf) for one in earlier)]),
        groups_before=sum(one.header.tasks for one in earlier),
        submitter=f"{getpass.getuser()}@{socket.gethostname()}",
    )
    # First the directories, then the segment: workers never create one, so that a claim is one operation.
    make_directories(paths.segment_directories(legs, name, len(lines) * samples))
    created = publish(path, encode_segment(header, lines))
    present = read_segment(path)
    if present is None:
        raise SpoolError(f"submission {key!r}: {path} vanished after it was written; submit it again")
    return Submission(present, created=True) if created else _same(present, digest, key)


def _same(present: Segment, digest: str, key: str) -> Submission:
    if present.key != key:
        raise ConfigError(f"submission keys {key!r} and {present.key!r} have one hash; choose another key")
    if present.header.sha256 != digest:
        raise ConfigError(
            f"submission key {key!r} stands for other content already: {present.header.tasks} tasks with "
            f"{present.samples} samples each, sent by {present.header.submitter}. Give the new content a new "
            "key, or submit what was submitted then"
        )
    return Submission(present, created=False)


def _checked_lines(tasks: Sequence[Task], samples: int, key: str) -> list[str]:
    if not key:
        raise ConfigError("a submission needs a key: any text that names it, such as 'epoch0'")
    if samples < 1:
        raise ConfigError(f"submission {key!r}: samples must be at least 1, not {samples}")
    if not tasks:
        raise ConfigError(f"submission {key!r} has no tasks")
    if len(tasks) * samples > 2**32:
        raise ConfigError(f"submission {key!r} has more than 2^32 rollouts; split it over several keys")
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        first = seen.setdefault(task.task_id, index)
        if first != index:
            raise ConfigError(
                f"submission {key!r}: tasks {first} and {index} (counted from 0) both have task_id "
                f"{task.task_id!r}; it must be unique within a submission"
            )
    return [task.to_json() for task in tasks]
