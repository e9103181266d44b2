"""Finds out whether a file system has what claims and commits rest on, and refuses it where it has not."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NoReturn

from pydantic import Field

from hpcroll.contract import Record
from hpcroll.errors import UnsafeFilesystemError
from hpcroll.fs.atomic import fsync_directory, publish
from hpcroll.fs.mounts import filesystem_type

LEAST_FREE_BYTES = 64 << 20
LEAST_FREE_INODES = 1_000

Link = Callable[[Path, Path], None]


class FilesystemProbe(Record):
    """What a file system was found to do; it stands in run.json."""

    SCHEMA: ClassVar[str] = "1.0"

    directory: str
    filesystem: str
    """The kernel's name of its type, for example `nfs4`."""
    claims: str = "link"
    """How names are claimed: hard links across directories."""
    symlinks: bool
    """Symbolic links work and are followed."""
    fsync_s: float = Field(ge=0)
    """Seconds that one durable publication of 4 KiB took."""
    free_bytes: int = Field(ge=0)
    free_inodes: int | None
    """None where the file system does not count them."""


def probe_filesystem(directory: Path, *, link: Link = os.link) -> FilesystemProbe:
    """Tries in `directory` what the spool needs of its file system; leaves nothing behind.

    Raises `UnsafeFilesystemError` with what is missing and what to do. `link` is the system call, for
    tests of file systems that this machine has not.
    """
    home = directory / f".probe-{secrets.token_hex(6)}"
    try:
        home.mkdir()
    except OSError as error:
        _refuse(directory, f"nothing can be created there ({error.strerror})")
    try:
        _probe_links(directory, home, link)
        fsync_s = _probe_fsync(directory, home)
        symlinks = _probe_symlinks(home)
        free_bytes, free_inodes = _probe_space(directory)
        return FilesystemProbe(
            directory=str(directory),
            filesystem=filesystem_type(directory),
            symlinks=symlinks,
            fsync_s=fsync_s,
            free_bytes=free_bytes,
            free_inodes=free_inodes,
        )
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _probe_links(directory: Path, home: Path, link: Link) -> None:
    tokens, names = home / "tokens", home / "names"
    tokens.mkdir()
    names.mkdir()
    (tokens / "a").write_bytes(b"a")
    (tokens / "b").write_bytes(b"b")
    name = names / "n"
    try:
        link(tokens / "a", name)
    except OSError as error:
        _refuse(directory, f"it makes no hard links from one directory to another ({error.strerror})")
    if name.read_bytes() != b"a":
        _refuse(directory, "a hard link does not read as the file it links to")
    try:
        link(tokens / "b", name)
    except OSError:
        # Whatever the errno: what counts is who has the name.
        if name.read_bytes() != b"a":
            _refuse(directory, "a refused hard link replaced the name all the same")
        return
    _refuse(directory, "a hard link replaces a name that exists, so that two workers could get one rollout")


def _probe_fsync(directory: Path, home: Path) -> float:
    started_s = time.monotonic()
    try:
        publish(home / "durable", b"\0" * 4096)
        fsync_directory(home)
    except OSError as error:
        _refuse(directory, f"a file cannot be made durable there ({error.strerror})")
    return time.monotonic() - started_s


def _probe_symlinks(home: Path) -> bool:
    name = home / "symlink"
    try:
        name.symlink_to("durable")
        return len(name.read_bytes()) == 4096
    except OSError:
        return False


def _probe_space(directory: Path) -> tuple[int, int | None]:
    found = os.statvfs(directory)
    free_bytes = found.f_bavail * found.f_frsize
    # A file system that makes inodes as it needs them reports none at all.
    free_inodes = found.f_favail if found.f_files else None
    if free_bytes < LEAST_FREE_BYTES:
        _refuse(directory, f"only {free_bytes >> 20} MiB are free, {LEAST_FREE_BYTES >> 20} are needed")
    if free_inodes is not None and free_inodes < LEAST_FREE_INODES:
        _refuse(directory, f"only {free_inodes} inodes are free, {LEAST_FREE_INODES} are needed")
    return free_bytes, free_inodes


def _refuse(directory: Path, reason: str) -> NoReturn:
    raise UnsafeFilesystemError(
        f"{directory} (file system {filesystem_type(directory)}) cannot hold a run: {reason}. Put the run "
        "directory on another file system that all nodes mount, such as the cluster's project or scratch "
        "area, or ask its administrators"
    )
