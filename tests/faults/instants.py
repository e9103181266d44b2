"""SIGKILL before a chosen system call of a child: each operation on a name, each write, each fsync."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.spools import watch_operations


def killed_at(instant: int, root: Path, work: Callable[[], object]) -> bool:
    """Works in a child that SIGKILL takes at its `instant`-th call that touches a file.

    A write at that instant is torn: a random part of its bytes is written. False: the child came to its end.
    """
    pid = os.fork()
    if pid == 0:
        _work_and_die(instant, root, work)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed by itself"
    return False


def _work_and_die(instant: int, root: Path, work: Callable[[], object]) -> None:
    count = itertools.count(1)
    write, pwrite, fsync = os.write, os.pwrite, os.fsync

    def is_due() -> bool:
        return next(count) == instant

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, path: str) -> None:
        if path.startswith(str(root)) and is_due():
            die()

    def torn(data: Any) -> bytes:
        whole = bytes(data)
        return whole[: random.Random(instant).randrange(len(whole) + 1)]

    def dying_write(descriptor: int, data: Any) -> int:
        if is_due():
            write(descriptor, torn(data))
            die()
        return write(descriptor, data)

    def dying_pwrite(descriptor: int, data: Any, offset: int) -> int:
        if is_due():
            pwrite(descriptor, torn(data), offset)
            die()
        return pwrite(descriptor, data, offset)

    def dying_fsync(descriptor: int) -> None:
        if is_due():
            die()
        fsync(descriptor)

    try:
        os.write, os.pwrite, os.fsync = dying_write, dying_pwrite, dying_fsync
        with watch_operations(watch):
            work()
        os._exit(0)
    finally:
        os._exit(99)
