"""Images on disk: where they are, whether they are whole, what names their content."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hpcroll.errors import ImageError

_SIF_HEADER = struct.Struct("<32s10s22x6q2q")
"""Launcher line, magic; then times, slots, descriptors, and last where the data begins and how long it is.

Source: the SIF format's own header definition, https://github.com/sylabs/sif (`pkg/sif`).
"""
_SIF_MAGIC = b"SIF_MAGIC\0"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One image of a directory."""

    path: Path
    kind: str
    """`sif` or `directory`."""
    size_bytes: int | None
    """None for a directory, whose files are not added up."""
    problem: str = ""
    """Why it cannot be used; empty where nothing speaks against it."""


def locate(image: str | None) -> Path:
    """The path of `image`; raises `ImageError` unless it is a whole SIF file or a root file system."""
    if image is None:
        raise ImageError("no image: set sandbox.image, or the task's own image")
    path = Path(image)
    try:
        if path.is_dir():
            if not is_root(path):
                raise ImageError(f"image {image} has neither bin/sh nor usr/bin/sh: no root file system")
        else:
            _check_sif(path)
        return path.resolve()
    except FileNotFoundError:
        raise ImageError(
            f"image {image} does not exist: give the path of a SIF file or directory "
            "(hpcroll images pull URI DEST makes one)"
        ) from None
    except OSError as error:
        raise ImageError(f"image {image} cannot be read: {error.strerror}") from error


def listing(directory: Path) -> Iterator[ImageInfo]:
    """The images in `directory` by name: SIF files, broken ones with their problem, and root file systems."""
    if not directory.is_dir():
        raise ImageError(f"{directory} is not a directory")
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if is_root(path):
                yield ImageInfo(path, "directory", None)
        elif path.suffix == ".sif":
            try:
                _check_sif(path)
                problem = ""
            except ImageError as error:
                problem = str(error)
            yield ImageInfo(path, "sif", path.stat().st_size, problem)


def is_root(path: Path) -> bool:
    """Whether directory `path` holds a root file system with a shell."""
    # Links inside may be absolute, hence dangling out here: their names are enough.
    return any((path / shell).exists() or (path / shell).is_symlink() for shell in ("bin/sh", "usr/bin/sh"))


def digest(path: Path) -> str:
    """SHA-256 (hex) of the file `path`; computed once for each state of the file."""
    state = path.stat()
    return _digest(path, state.st_size, state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=256)
def _digest(path: Path, _size_bytes: int, _mtime_ns: int, _inode: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sif(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(_SIF_HEADER.size)
    if len(head) < _SIF_HEADER.size or head[32:42] != _SIF_MAGIC:
        raise ImageError(f"image {path} is not a SIF file")
    *_others, data_offset, data_bytes = _SIF_HEADER.unpack(head)
    size_bytes = path.stat().st_size
    if size_bytes < data_offset + data_bytes:
        # Apptainer itself starts such an image, and fails only when the missing part is read.
        raise ImageError(
            f"image {path} is cut off: {size_bytes} of {data_offset + data_bytes} bytes; "
            "build or pull it again"
        )
