"""Files that appear whole or not at all, and stay after a crash of the node."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from hpcroll.fs.links import Settled, settle_link

TEMPORARY_PREFIX = "."
"""Names of unfinished files begin with it; listings skip them."""


def publish(path: Path, data: bytes) -> bool:
    """Creates `path` with `data`, durable on return; False where the name was there already.

    Readers see all of `data` or no file; an existing file is never replaced. A name that already holds
    exactly `data` counts as ours, since that is what an answer lost on its way looks like. Raises `OSError`
    where nothing could be created.
    """
    temporary = _write_beside(path, data)
    try:
        mine = settle_link(temporary, path, is_mine=lambda found: found == data) is Settled.MINE
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return mine


def replace(path: Path, data: bytes) -> None:
    """Puts `data` in the place of whatever `path` was, durable on return; readers see old or new."""
    temporary = _write_beside(path, data)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def read_fresh(path: Path) -> bytes | None:
    """The bytes of `path`, opened anew; None where there is no such name.

    Opening is what makes a network file system ask its server; a stat or a listing may be answered from a
    cache that is tens of seconds old.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def list_names(directory: Path) -> list[str]:
    """The names in `directory`, without unfinished files; empty where it does not exist.

    A hint: on a network file system a listing may be tens of seconds old.
    """
    try:
        return [name for name in os.listdir(directory) if not name.startswith(TEMPORARY_PREFIX)]  # noqa: PTH208
    except FileNotFoundError:
        return []


def make_directories(directories: list[Path]) -> None:
    """Creates `directories` with their parents, each of them durable on return."""
    parents: dict[Path, None] = {}
    for directory in directories:
        _make(directory, parents)
    for parent in parents:
        fsync_directory(parent)


def _make(directory: Path, parents: dict[Path, None]) -> None:
    if not directory.parent.is_dir():
        _make(directory.parent, parents)
    directory.mkdir(exist_ok=True)
    # Also where it existed: another process may have made it and died before its fsync.
    parents[directory.parent] = None


def fsync_directory(directory: Path) -> None:
    """Makes the names in `directory` durable: without it a crash of the node can lose a link."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network file systems whose server makes every name durable answer EINVAL for directories.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`: a signal or a full disk can cut a single write short."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_beside(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary
