"""The open shard of one worker: append, make durable, and, once `done` says so, mark."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hpcroll.contract import RolloutRef, Trajectory
from hpcroll.errors import ShardError
from hpcroll.fs.atomic import fsync_directory
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import encode_frames, raw_frames
from hpcroll.shards.format.commit_log import RecordAddress, pack_mark
from hpcroll.shards.format.frames import Header, parse_header
from hpcroll.shards.level0.dictionary_keeper import DictionaryKeeper

if TYPE_CHECKING:
    from hpcroll.config import ShardConfig  # at run time the trainer's reader needs no config

_MIB = 1 << 20


class _AppendFile:
    """A file that only this process writes, at an end that it alone moves."""

    def __init__(self, path: Path, fsync: Callable[[int], None]) -> None:
        self.path = path
        self._fsync = fsync
        # O_EXCL: an incarnation that finds its own shard was started twice, and must not write into it.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.end = 0

    def append(self, data: bytes) -> int:
        """Writes `data` at the end and returns its offset; after an `OSError` the end is where it was."""
        position, view = self.end, memoryview(data)
        try:
            while view:
                written = os.pwrite(self._descriptor, view, position)
                position, view = position + written, view[written:]
        except OSError:
            # The next append writes over what a full disk cut short; this only spares readers the look.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.end)
            raise
        offset, self.end = self.end, position
        return offset

    def sync(self) -> None:
        self._fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class PreparedRecord:
    """A record on its way into a shard; `frames` are raw, empty once dictionaries are made."""

    header: Header
    data: bytes = field(repr=False)
    group_id: str
    frames: Mapping[int, bytes] = field(repr=False)


class ShardWriter:
    """Writes the shards and commit logs of one incarnation; nobody else ever writes them.

    The order that keeps the promise: `append`, `sync`, link `done`, then `mark`. Safe to call from several
    threads. Opens its first shard at once, so that a full or read-only file system shows before work does.
    """

    def __init__(
        self,
        paths: RunPaths,
        incarnation_id: str,
        config: ShardConfig,
        *,
        fsync: Callable[[int], None] = os.fsync,
    ) -> None:
        """`fsync` is the system call, for tests of disks that fail."""
        self._paths = paths
        self._fsync = fsync
        self._incarnation = incarnation_id
        self._level = config.level
        self._most_bytes = config.shard_mb * _MIB
        self._lock = threading.Lock()
        self._index = -1
        self._unsynced: list[_AppendFile] = []
        self._logs: dict[int, _AppendFile] = {}
        self._written: set[RolloutRef] = set()
        self._failed: str | None = None
        self._shard = self._open_next()
        self._dictionaries = DictionaryKeeper(paths, config.dictionary)

    @property
    def path(self) -> Path:
        """The shard that the next record goes to, unless it is full."""
        return self._shard.path

    def prepare(self, trajectory: Trajectory) -> PreparedRecord:
        """The record of `trajectory`, ready for `append`: the work that several threads may do at once.

        Raises `ShardError` where the trajectory cannot be stored, or names another incarnation.
        """
        record = trajectory.record
        if record.incarnation != self._incarnation:
            raise ShardError(
                f"rollout {record.rollout_id}: its record names incarnation {record.incarnation!r}, this "
                f"shard belongs to {self._incarnation!r}"
            )
        frames = raw_frames(trajectory)
        data = encode_frames(trajectory, frames, level=self._level, dictionaries=self._dictionaries.current)
        header = parse_header(data)
        assert header is not None, "what was just encoded has a sound header"
        return PreparedRecord(header, data, record.group_id, frames if self._dictionaries.samples else {})

    def append(self, trajectory: Trajectory | PreparedRecord) -> RecordAddress:
        """Writes the record; not durable before `sync` returns.

        Raises `ShardError` where the trajectory names another incarnation, where this incarnation has
        written a record of the rollout before, or after an `OSError` of `sync`; `OSError` where the file
        system refuses, and then nothing was written.
        """
        prepared = trajectory if isinstance(trajectory, PreparedRecord) else self.prepare(trajectory)
        header, data = prepared.header, prepared.data
        with self._lock:
            self._require_usable()
            if header.ref in self._written:
                # (rollout, incarnation) names one record: a second could not be told from the first.
                raise ShardError(
                    f"rollout {header.ref}: incarnation {self._incarnation} has already written a record of "
                    "it; start a new incarnation before trying it again"
                )
            if self._shard.end and self._shard.end + len(data) > self._most_bytes:
                self._unsynced.append(self._shard)  # so that the next sync closes it, whatever it holds
                self._shard = self._open_next()
            offset = self._shard.append(data)
            self._written.add(header.ref)
            self._unsynced.append(self._shard)
            self._dictionaries.offer(prepared.group_id, prepared.frames)
            return RecordAddress(self._index, offset, len(data), header.ref, header.attempt, header.checksum)

    def sync(self) -> None:
        """Makes durable every record appended before the call.

        After an `OSError` nobody knows what the disk holds, and a second fsync may report success for
        pages that the kernel dropped: the writer then refuses further work.
        """
        with self._lock:
            self._require_usable()
            files, self._unsynced = dict.fromkeys(self._unsynced), []
        for file in files:
            try:
                file.sync()  # outside the lock: others may append meanwhile
            except OSError as error:
                self._failed = f"{file.path}: fsync failed: {error}"
                raise
            self._close_if_full(file)

    def mark(self, addresses: Iterable[RecordAddress]) -> None:
        """Notes in the commit log that `done` confirms these records; durable on return.

        Readers find a confirmed record without its mark too, only later.
        """
        touched: dict[_AppendFile, None] = {}
        with self._lock:
            for address in addresses:
                log = self._logs[address.shard_index]
                log.append(pack_mark(address))
                touched[log] = None
        for log in touched:
            log.sync()  # also what makes the mark visible to other nodes of a network file system

    def close(self) -> None:
        """Syncs and closes; the files stay as they are. Safe to call again."""
        self._dictionaries.close()
        with self._lock, ExitStack() as closing:
            files = dict.fromkeys((*self._unsynced, self._shard)) if self._logs else {}
            for file in (*files, *self._logs.values()):
                closing.callback(file.close)
            self._unsynced, self._logs = [], {}
            if self._failed is None:
                self._failed = "the writer is closed"
                for file in files:
                    file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_next(self) -> _AppendFile:
        index = self._index + 1
        shard = _AppendFile(self._paths.shard_file(self._incarnation, index), self._fsync)
        self._logs[index] = _AppendFile(self._paths.commit_log(self._incarnation, index), self._fsync)
        fsync_directory(self._paths.shards)
        self._index = index
        return shard

    def _close_if_full(self, file: _AppendFile) -> None:
        with self._lock:
            if file is not self._shard and file not in self._unsynced:
                file.close()

    def _require_usable(self) -> None:
        if self._failed is not None:
            raise ShardError(f"incarnation {self._incarnation} cannot write on: {self._failed}")
