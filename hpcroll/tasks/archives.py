"""Reproducible archives: the same files give the same bytes, whoever packs them, whenever."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

_MTIME = 315_532_800  # 1980-01-01, the earliest time that a zip file can carry
_LEVEL = 10
_NEVER = frozenset({"__pycache__", ".git"})


def pack(root: Path, archive: Path, *, only: Iterable[str] = (".",), without: Iterable[str] = ()) -> None:
    """Writes the files of `root` at the paths `only` as tar.zst, but none below the paths `without`.

    Times, owners and modes but the executable bit are dropped, and names sorted, so that the bytes of the
    archive depend on names and contents alone. Byte code and .git are left out.
    """
    excluded = {root / path for path in without}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted({found for start in only for found in list_files(root / start, excluded)}):
            info = tar.gettarinfo(path, arcname=str(path.relative_to(root)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = _MTIME
            info.mode = 0o755 if info.mode & 0o111 else 0o644
            if info.isreg():
                with path.open("rb") as source:
                    tar.addfile(info, source)
            else:
                tar.addfile(info)
    archive.write_bytes(zstandard.ZstdCompressor(level=_LEVEL).compress(buffer.getvalue()))


def list_files(path: Path, excluded: set[Path]) -> Iterator[Path]:
    """The files and symbolic links at and below `path` that belong into an archive, in no order."""
    if path in excluded or path.name in _NEVER or path.suffix == ".pyc":
        return
    if path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            yield from list_files(child, excluded)
    elif path.is_file() or path.is_symlink():
        yield path
