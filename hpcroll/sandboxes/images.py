"""Images on disk, and spython behind an adapter: pull, build, inspect and list."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from hpcroll.errors import ImageError

_SIF_MAGIC = b"SIF_MAGIC"
_MAGIC_OFFSET = 32
"""A SIF file starts with a launcher line of 32 bytes; its magic follows."""


def locate(image: str | None) -> Path:
    """The path of `image`; raises `ImageError` where it is neither a SIF file nor a root file system."""
    if image is None:
        raise ImageError("no image: set sandbox.image, or the task's own image")
    path = Path(image)
    try:
        if path.is_dir():
            if not any((path / cat).exists() for cat in ("bin/cat", "usr/bin/cat")):
                raise ImageError(f"image {image} has no bin/cat: it is not a root file system")
            return path.resolve()
        with path.open("rb") as file:
            head = file.read(_MAGIC_OFFSET + len(_SIF_MAGIC))
    except FileNotFoundError:
        raise ImageError(
            f"image {image} does not exist: give the path of a SIF file or directory "
            "(hpcroll images pull URI DEST makes one)"
        ) from None
    except OSError as error:
        raise ImageError(f"image {image} cannot be read: {error.strerror}") from error
    if head[_MAGIC_OFFSET:] != _SIF_MAGIC:
        raise ImageError(f"image {image} is not a SIF file")
    return path.resolve()


def digest(path: Path) -> str:
    """SHA-256 (hex) of the file `path`; computed once for each state of the file."""
    state = path.stat()
    return _digest(path, state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=256)
def _digest(path: Path, _size_bytes: int, _mtime_ns: int, _inode: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
