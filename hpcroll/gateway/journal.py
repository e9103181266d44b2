"""The journal: every model call, on disk before the agent sees the reply."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from hpcroll.contract import CallTokens, RecordedCall
from hpcroll.errors import SpoolError
from hpcroll.fs import fsync_directory, write_all
from hpcroll.gateway.frames import decode, encode, frame, frames, session_key
from hpcroll.gateway.prefix import PromptFolder

_LEVEL = 1


@dataclass(frozen=True, slots=True)
class _Pending:
    epoch: int
    session: int
    payload: bytes
    written: Future[None]


@dataclass(slots=True)
class _Session:
    """What the journal remembers of a session that may go on."""

    folder: PromptFolder = field(default_factory=PromptFolder)
    folded: CallTokens | None = None
    """Of the latest call that was folded."""
    queued: set[int] = field(default_factory=set)
    """Calls that are in the file or about to be: others may build on them."""


class Journal:
    """The journal file of this incarnation. Appends that wait at the same time share one fsync."""

    def __init__(self, path: Path) -> None:
        """Does no I/O; `open` creates the file."""
        self._path = path
        self._sessions: dict[tuple[str, int], _Session] = {}
        self._pending: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        self._end = 0
        self._broken: OSError | None = None
        self._epoch = 0
        """Failed writes so far; only the writer thread counts."""
        self._sessions_epoch = 0

    @property
    def path(self) -> Path:
        return self._path

    def open(self) -> None:
        """Creates the file, durably, and starts the writer thread.

        Raises `SpoolError` where the file exists already: an incarnation has one journal, once.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags, 0o644)
            fsync_directory(self._path.parent)
        except OSError as error:
            raise SpoolError(f"journal {self._path} cannot be created: {error.strerror}") from error
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    async def append(self, recorded: RecordedCall) -> None:
        """Returns once the call is durable. The call is queued before the first await.

        Raises `SpoolError` where it could not be written; then it is not in the journal.
        """
        await asyncio.shield(asyncio.wrap_future(self.submit(recorded)))

    def fold(self, recorded: RecordedCall) -> RecordedCall:
        """The call with its prompt folded onto earlier calls of its session: what of it is worth keeping.

        In memory a session's calls then take what is new in each, not the square of the turns. Fold a call
        once, and submit what it returns; `submit` folds what was not.
        """
        session = self._session(recorded)
        if recorded.tokens is session.folded:
            return recorded
        session.folded = session.folder.fold(recorded.call.call_index, recorded.tokens)
        return RecordedCall(recorded.call, session.folded)

    def submit(self, recorded: RecordedCall) -> Future[None]:
        """Queues the call; the future resolves once it is durable."""
        if self._thread is None:
            raise SpoolError(f"journal {self._path} is not open; call {recorded.call.call_index} was lost")
        epoch = self._epoch
        if epoch != self._sessions_epoch:
            # What was lost cannot be built upon: the next prompt of every session is written whole.
            for session in self._sessions.values():
                session.queued.clear()
            self._sessions_epoch = epoch
        call = recorded.call
        queued = self._session(recorded).queued
        payload = encode(self.fold(recorded), known=queued)
        queued.add(call.call_index)
        pending = _Pending(epoch, session_key(call.rollout_id, call.attempt), payload, Future())
        # An agent that goes away cancels its wait, never the write: the thread resolves every future.
        pending.written.set_running_or_notify_cancel()
        self._pending.put(pending)
        return pending.written

    def _session(self, recorded: RecordedCall) -> _Session:
        return self._sessions.setdefault((recorded.call.rollout_id, recorded.call.attempt), _Session())

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Drops what is remembered of a session that has ended."""
        self._sessions.pop((rollout_id, attempt), None)

    async def close(self) -> None:
        """Writes what is queued and closes the file; idempotent."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._pending.put(None)
        await asyncio.to_thread(thread.join)
        os.close(self._descriptor)

    def _write_all(self) -> None:
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        while (first := self._pending.get()) is not None:
            batch = [first]
            closing = False
            while True:
                try:
                    pending = self._pending.get_nowait()
                except queue.Empty:
                    break
                if pending is None:
                    closing = True
                    break
                batch.append(pending)
            self._write(batch, compressor)
            if closing:
                return

    def _write(self, batch: list[_Pending], compressor: zstandard.ZstdCompressor) -> None:
        good = [item for item in batch if item.epoch == self._epoch]
        # Queued before a failure was known, these build on calls that were lost.
        self._fail([item for item in batch if item.epoch != self._epoch], "an earlier write failed")
        data = b"".join(frame(item.session, compressor.compress(item.payload)) for item in good)
        try:
            if self._broken is not None:
                raise self._broken
            write_all(self._descriptor, data)
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._epoch += 1
            self._cut(error)
            self._fail(good, str(error.strerror))
            return
        self._end += len(data)
        for item in good:
            item.written.set_result(None)

    def _fail(self, items: list[_Pending], reason: str) -> None:
        for item in items:
            item.written.set_exception(
                SpoolError(f"journal {self._path} cannot be written: {reason}; the reply is withheld")
            )

    def _cut(self, error: OSError) -> None:
        # Half a frame in the middle would hide every later one from readers.
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError:
            self._broken = error


def read_journal(
    path: Path, *, rollout_id: str | None = None, attempt: int | None = None
) -> Iterator[RecordedCall]:
    """The calls of a journal in the order in which they ended, prompts folded and messages as deltas.

    `rollout_id` and `attempt` select; both together skip other sessions without decoding them. A torn
    or unfinished tail ends the iteration: the owner may still be writing, or was killed. Raises
    `CorruptRecordError` where damaged bytes are followed by whole frames; what came before is good.
    """
    wanted = session_key(rollout_id, attempt) if rollout_id is not None and attempt is not None else None
    decompressor = zstandard.ZstdDecompressor()
    sessions: dict[int, dict[int, CallTokens]] = {}
    for offset, session, payload in frames(path):
        if wanted is not None and session != wanted:
            continue
        known = sessions.setdefault(session, {})
        recorded = decode(decompressor.decompress(payload), known, where=f"journal {path} byte {offset}")
        call = recorded.call
        if rollout_id in (None, call.rollout_id) and attempt in (None, call.attempt):
            yield recorded
