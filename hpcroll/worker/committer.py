"""Group commit: many rollouts share the fsyncs that make them durable, in the one order that is safe.

    append the records → fsync the shard → link `done` → fsync its directory → mark

A record is never visible before it is durable, and never marked where another attempt won.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpcroll.contract import Trajectory
from hpcroll.shards import PreparedRecord, RecordAddress, ShardWriter
from hpcroll.spool import Claim, sync_done_directories

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    claim: Claim
    record: PreparedRecord | None
    """None where the leg hands a bundle to the next one, which is durable already."""
    won: asyncio.Future[bool]
    address: RecordAddress | None = None


class Committer:
    """Commits the results of one worker; `run` it as a task, then `commit` from any other."""

    def __init__(self, writer: ShardWriter, *, window_s: float) -> None:
        self._writer = writer
        self._window_s = window_s
        self._pending: list[_Pending] = []
        self._first_at = 0.0
        """When the oldest of them came in, on the loop's clock."""
        self._wake = asyncio.Event()

    async def commit(self, claim: Claim, trajectory: Trajectory | None) -> bool:
        """Whether this attempt's result is the rollout's; durable and visible on return of True.

        False: another attempt won, and this one's record is never marked. Raises `OSError` or
        `HpcrollError` where the file system refuses; nothing is visible then.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(claim, trajectory)))

    async def run(self) -> None:
        """Commits in groups until cancelled."""
        while True:
            await self._wake.wait()
            # Counted from the first one's arrival: it may have waited for the group before.
            late_s = asyncio.get_running_loop().time() - self._first_at
            await asyncio.sleep(max(0.0, self._window_s - late_s))
            self._wake.clear()
            group, self._pending = self._pending, []
            failures = await asyncio.to_thread(self._commit_group, group)
            for item in group:
                if item.won.cancelled():
                    continue
                error = failures.get(id(item))
                if error is not None:
                    item.won.set_exception(error)
                else:
                    item.won.set_result(item.claim.won)

    async def _commit(self, claim: Claim, trajectory: Trajectory | None) -> bool:
        # Encoded here, not in the group's turn: several at once, and while another group is synced.
        record = None if trajectory is None else await asyncio.to_thread(self._writer.prepare, trajectory)
        loop = asyncio.get_running_loop()
        item = _Pending(claim, record, loop.create_future())
        if not self._pending:
            self._first_at = loop.time()
        self._pending.append(item)
        self._wake.set()
        return await item.won

    def _commit_group(self, group: list[_Pending]) -> dict[int, Exception]:
        """Runs in a thread; the error of each item that failed, by `id`."""
        failures: dict[int, Exception] = {}

        def sound() -> list[_Pending]:
            return [item for item in group if id(item) not in failures]

        def step(items: list[_Pending], work: Callable[[], object]) -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - handed to whoever awaits these items
                failures.update({id(item): error for item in items})

        for item in group:
            step([item], partial(self._append, item))
        step(sound(), self._writer.sync)
        for item in sound():
            step([item], item.claim.link_done)
        step(sound(), lambda: sync_done_directories([item.claim for item in sound()]))
        marks = [item.address for item in sound() if item.claim.won and item.address is not None]
        try:
            self._writer.mark(marks)
        except OSError as error:
            # `done` is the truth, and readers find unmarked records by scanning.
            log.warning("%d commits stay without a mark: %s", len(marks), error)
        return failures

    def _append(self, item: _Pending) -> None:
        if item.record is not None:
            item.claim.note_record()
            item.address = self._writer.append(item.record)
