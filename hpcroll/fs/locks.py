"""Locks for moments on one node; claims on rollouts are links (`hpcroll.fs.links`), never locks.

`flock` on a shared file system is granted on two nodes at once, fails, or holds on one node only,
depending on mount options that nobody can see. So these locks refuse any directory that other nodes might
mount, instead of pretending.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hpcroll.errors import UnsafeFilesystemError
from hpcroll.fs.mounts import filesystem_type, is_node_local

_POLL_S = 0.05


@contextmanager
def node_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock file `path` against every other holder on this node.

    Released when the block ends or the process dies. Raises `TimeoutError` after `timeout_s` seconds, and
    `UnsafeFilesystemError` where `path` does not lie on a node-local file system.
    """
    require_node_local(path.parent)
    lock = _lock(path)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=_POLL_S)
    except Timeout as error:
        raise TimeoutError(f"lock {path} is still held by another process after {timeout_s:g} s") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def node_slots(directory: Path, count: int, *, timeout_s: float) -> Iterator[int]:
    """Holds one of `count` slots shared by all processes of this node that name `directory`.

    Yields the slot's number. Raises like `node_lock`. Waiters are not served in order.
    """
    require_node_local(directory)
    directory.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + timeout_s
    while True:
        for slot in range(count):
            lock = _lock(directory / f"slot-{slot}")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                yield slot
            finally:
                lock.release()
            return
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"all {count} slots in {directory} are still taken after {timeout_s:g} s")
        time.sleep(_POLL_S)


def require_node_local(directory: Path) -> None:
    """Raises `UnsafeFilesystemError` unless `directory` is known to lie on this node alone."""
    type_name = filesystem_type(directory)
    if not is_node_local(type_name):
        raise UnsafeFilesystemError(
            f"{directory} lies on {type_name}, which is not known to be node-local: a lock there may hold on "
            "one node only; choose a node-local directory (config key sandbox.scratch, for example /tmp)"
        )


def _lock(path: Path) -> FileLock:
    # No fallback: a lock that needs a PID to tell a dead owner is wrong across PID namespaces. Not
    # thread-local: whoever holds the object may release it from another thread of a pool.
    return FileLock(path, thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
