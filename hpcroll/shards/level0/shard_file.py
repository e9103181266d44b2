"""One shard on disk, as a reader sees it: maybe still growing, maybe torn, maybe damaged."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcroll.contract import RolloutRef
from hpcroll.fs.atomic import list_names, read_fresh
from hpcroll.fs.links import read_token
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.commit_log import RecordAddress, parse_marks
from hpcroll.shards.format.dictionaries import dictionaries_of
from hpcroll.shards.format.frames import (
    HEADER_BYTES_MOST,
    MAGIC_PREFIX,
    Header,
    is_sound,
    parse_header,
)
from hpcroll.shards.format.place import ShardName

_SEARCH_BYTES = 1 << 20


def list_shards(paths: RunPaths) -> list[ShardName]:
    """The shards of the run, in reading order; on a network file system the newest may be missing yet."""
    stems = (name.removesuffix(".shard") for name in list_names(paths.shards) if name.endswith(".shard"))
    return sorted(name for stem in stems if (name := ShardName.parse(stem)) is not None)


def is_finished(paths: RunPaths, name: ShardName) -> bool:
    """Whether the shard's owner will never write it again: it is gone, or has gone on to its next shard."""
    if is_there(paths.ended_file(name.incarnation)):
        return True
    return is_there(paths.commit_log(name.incarnation, name.index + 1))


def is_there(path: Path) -> bool:
    """Whether `path` can be opened; a network file system asks its server on open, not on stat."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return False
    return True


def committer(paths: RunPaths, leg: str, ref: RolloutRef) -> str | None:
    """The incarnation whose record of `ref` is the committed one; None while there is none."""
    return read_token(paths.done_link(leg, ref))


def logs_of(paths: RunPaths, name: ShardName) -> list[bytes]:
    """The marks of a shard as files: its commit log, and what adopters wrote."""
    logs = [read_fresh(paths.commit_log(name.incarnation, name.index))]
    generation = 0
    while (adopted := read_fresh(paths.adoption_file(name.incarnation, name.index, generation))) is not None:
        logs.append(adopted)
        generation += 1
    return [log for log in logs if log is not None]


def marks_in(
    logs: Iterable[bytes], name: ShardName, *, only: RolloutRef | None = None
) -> dict[int, RecordAddress]:
    """The marked records of shard `name` (those of rollout `only`) by offset."""
    found = (mark for log in logs for mark in parse_marks(log, only=only)[0])
    return {mark.offset: mark for mark in found if mark.shard_index == name.index}


def marks_of(paths: RunPaths, name: ShardName) -> dict[int, RecordAddress]:
    """The marked records of shard `name` by offset, as its files say now."""
    return marks_in(logs_of(paths, name), name)


class OpenShard:
    """A shard opened for reading: anew for every look, so that a network file system asks its server."""

    def __init__(self, paths: RunPaths, name: ShardName) -> None:
        self.name = name
        self.path = paths.shard_file(name.incarnation, name.index)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size
        self._dictionaries = dictionaries_of(paths)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Call it once. Where the mount is gone, closing says so, which nobody needs to know."""
        with suppress(OSError):
            os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """The `length` bytes at `offset`, fewer where the file ends before."""
        parts: list[bytes] = []
        while length > 0 and (part := os.pread(self._descriptor, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def header_at(self, offset: int) -> Header | None:
        """The sound header of a record at `offset`; None where there is none (yet)."""
        return parse_header(self.read(offset, HEADER_BYTES_MOST), self._dictionaries)

    def frames_at(self, offset: int, header: Header, kinds: Collection[int] | None = None) -> bytes | None:
        """The record at `offset` up to the last frame of `kinds` (None: all of it).

        None where those frames are not (yet) as they were written.
        """
        length = header.record_bytes if kinds is None else header.prefix_bytes(kinds)
        data = self.read(offset, length)
        return data if is_sound(header, data, kinds) else None

    def next_header_after(self, offset: int) -> int | None:
        """The next offset past `offset` where a sound header stands, after damage; None to the end."""
        position = offset + 1
        while position < self.size:
            chunk = self.read(position, _SEARCH_BYTES)
            hit = chunk.find(MAGIC_PREFIX)
            while hit >= 0:
                if self.header_at(position + hit) is not None:
                    return position + hit
                hit = chunk.find(MAGIC_PREFIX, hit + 1)
            position += max(1, len(chunk) - len(MAGIC_PREFIX) + 1)
        return None
