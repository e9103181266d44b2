"""How sandboxes come to start: not too many at once, each with a scratch directory of its own."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hpcroll.config import SandboxConfig
from hpcroll.fs.locks import node_slots
from hpcroll.sandboxes.attendant.removal import remove_tree
from hpcroll.sandboxes.base import SandboxSpec
from hpcroll.sandboxes.scratch import Scratch, slots_directory, sweep

_POLL_S = 0.05


class Starts:
    """The start limits of one worker, and its scratch, which is made at the first start."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._per_image: dict[str | None, asyncio.Semaphore] = {}
        self._scratch: Scratch | None = None

    @asynccontextmanager
    async def slot(self, spec: SandboxSpec) -> AsyncIterator[Path]:
        """A new scratch directory, once a sandbox of this image may start; removed where the start fails."""
        image = spec.image or self._config.image
        turn = self._per_image.setdefault(image, asyncio.Semaphore(self._config.start_limits.per_image))
        async with turn:
            scratch = self._open_scratch().make(spec.name)
            try:
                async with self._node_slot():
                    yield scratch
            except BaseException:
                await asyncio.to_thread(remove_tree, scratch)
                raise

    @asynccontextmanager
    async def _node_slot(self) -> AsyncIterator[None]:
        directory = slots_directory(self._config.scratch)
        while True:
            slot = node_slots(directory, self._config.start_limits.per_node, timeout_s=0)
            try:
                slot.__enter__()
            except TimeoutError:
                # Polled here, not in a thread: waiting starts must not fill the thread pool.
                await asyncio.sleep(_POLL_S)
                continue
            try:
                yield
            finally:
                slot.__exit__(None, None, None)
            return

    def _open_scratch(self) -> Scratch:
        if self._scratch is None:
            sweep(self._config.scratch)
            self._scratch = Scratch(self._config.scratch)
            weakref.finalize(self, _close, self._scratch, os.getpid())
        return self._scratch


def _close(scratch: Scratch, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork of the worker, whose exit would take the worker's scratch along
        scratch.close()
