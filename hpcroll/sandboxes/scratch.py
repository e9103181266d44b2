"""A worker's own directory on node-local disk, and the removal of what dead workers left."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
from pathlib import Path

from hpcroll.errors import SandboxError
from hpcroll.sandboxes.attendant.removal import remove_tree

_log = logging.getLogger(__name__)

_LOCK = "alive"
_SLOTS = "start-slots"
_CACHE = "image-cache"
_AGENTS = "agents"


class Scratch:
    """Directory `<base>/hpcroll-<uid>/<token>`, held by a lock for as long as this process lives.

    The lock, not a pid, says whether its worker lives: pids come again, and other nodes have their own.
    It is on node-local disk, where `flock` can be trusted.
    """

    def __init__(self, base: Path) -> None:
        self._home = _own_directory(base)
        while True:
            self.root = self._home / secrets.token_hex(6)
            self.root.mkdir(mode=0o700)
            lock = self._hold(self.root)
            if lock is not None:
                self._lock = lock
                return

    @staticmethod
    def _hold(root: Path) -> int | None:
        """The descriptor that holds `root`; None where a sweeper was faster than the lock."""
        try:
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (root / _LOCK).stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except OSError:
            pass  # swept between the two calls: take another name
        os.close(lock)
        return None

    def make(self, name: str) -> Path:
        """A new directory for the sandbox `name`; `SandboxError` where there is no room for it."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80].strip(".-") or "sandbox"
        path = self.root / f"{readable}-{secrets.token_hex(3)}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise SandboxError(f"scratch {path} cannot be made: {error.strerror}") from error
        return path

    def close(self) -> None:
        """Removes the directory and lets go of it."""
        remove_tree(self.root)
        os.close(self._lock)


def slots_directory(base: Path) -> Path:
    """Where this user's workers of the node share their start slots."""
    return _own_directory(base) / _SLOTS


def cache_directory(base: Path) -> Path:
    """Where this user's pulls on the node keep their layers; made where it is missing."""
    path = _own_directory(base) / _CACHE
    path.mkdir(exist_ok=True)
    return path


def agents_directory(base: Path) -> Path:
    """Where this user's workers of the node keep unpacked agent programs; made where it is missing."""
    path = _own_directory(base) / _AGENTS
    path.mkdir(exist_ok=True)
    return path


def sweep(base: Path) -> list[Path]:
    """Removes the directories of this user's dead workers below `base`; returns them."""
    home = _own_directory(base)
    swept = []
    for root in home.iterdir():
        try:
            lock = os.open(root / _LOCK, os.O_RDWR)
        except OSError:
            continue  # being made, or gone already
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            try:
                remove_tree(root)
                swept.append(root)
            except OSError as error:
                # Its attendants may be at it still, or it holds files of a fakeroot's other users.
                _log.warning("scratch=%s not_swept=%s", root, error)
        finally:
            os.close(lock)
    return swept


def _own_directory(base: Path) -> Path:
    home = base / f"hpcroll-{os.getuid()}"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = home.lstat()
    except OSError as error:
        raise SandboxError(
            f"scratch {home} cannot be made: {error.strerror}; set sandbox.scratch to a node-local directory"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SandboxError(f"scratch {home} is not ours; set sandbox.scratch to another directory")
    return home
