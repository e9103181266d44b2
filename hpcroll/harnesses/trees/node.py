"""The node's side of the store: each archive is unpacked once, and all workers of the node share the tree."""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
import time
from pathlib import Path
from typing import IO, cast

import zstandard

from hpcroll.errors import HarnessError
from hpcroll.fs.locks import node_lock
from hpcroll.harnesses.trees.store import Archive
from hpcroll.sandboxes.attendant.removal import remove_tree
from hpcroll.sandboxes.scratch import agents_directory

if sys.version_info >= (3, 12):
    import tarfile
else:
    # Extraction filters came with 3.11.4; distributions of 3.11 ship older ones.
    from backports import tarfile

_log = logging.getLogger(__name__)

_UNPACK_S = 1800.0


def unpack(archive: Archive, scratch: Path) -> Path:
    """The tree of `archive` on this node, unpacked below `scratch` where it is not there yet.

    One process unpacks, others wait. The tree appears whole, its archive's digest checked, or not at all;
    what a process left that died on the way is removed. Raises `HarnessError`.
    """
    home = agents_directory(scratch)
    tree = home / archive.stem
    if tree.is_dir():
        return tree
    try:
        with node_lock(home / f"{archive.stem}.lock", timeout_s=_UNPACK_S):
            if not tree.is_dir():
                for left in home.glob(f".{archive.stem}.*"):
                    remove_tree(left)
                _unpack(archive, tree)
    except TimeoutError as error:
        raise HarnessError(f"agent {archive.name}: another worker still unpacks it: {error}") from error
    return tree


def _unpack(archive: Archive, tree: Path) -> None:
    started = time.monotonic()
    part = tree.with_name(f".{archive.stem}.{secrets.token_hex(6)}")
    part.mkdir()
    try:
        with archive.path.open("rb") as file:
            watched = _Hashed(file)
            reader = zstandard.ZstdDecompressor().stream_reader(cast(IO[bytes], watched))
            with tarfile.open(fileobj=reader, mode="r|") as tar:
                tar.extractall(part, filter=_as_of_now)
            while reader.read(1 << 20) or watched.read(1 << 20):
                pass
        if watched.digest() != archive.digest:
            raise _damaged(archive, f"its SHA-256 begins with {watched.digest()}")
        part.rename(tree)
    except (zstandard.ZstdError, tarfile.TarError, EOFError) as error:
        raise _damaged(archive, str(error)) from error
    except OSError as error:
        raise HarnessError(f"agent archive {archive.path} does not unpack: {error}") from error
    finally:
        if part.exists():
            remove_tree(part)
    _log.info("agent=%s tree=%s unpacked_s=%.1f", archive.stem, tree, time.monotonic() - started)


def _as_of_now(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    # Archives have no times, and programs that clean temporary directories go by them.
    kept = tarfile.tar_filter(member, path)
    return kept if kept is None else kept.replace(mtime=time.time(), deep=False)


def _damaged(archive: Archive, reason: str) -> HarnessError:
    return HarnessError(
        f"agent archive {archive.path} is damaged: {reason}; run `hpcroll agents install {archive.name} "
        "--force`"
    )


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """The first 16 digits of the SHA-256 of what was read."""
        return self._hash.hexdigest()[:16]
