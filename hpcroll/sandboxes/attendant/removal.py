"""Removes what payloads left on the node's disk."""

from __future__ import annotations

import os
from pathlib import Path


def remove_tree(root: Path) -> None:
    """Removes `root` and everything below it, whatever depth and modes a payload gave its directories.

    Symbolic links are removed, never followed; what another process removes meanwhile is no error. Raises
    `OSError` for what belongs to another user.
    """
    # Each directory is moved up before it is emptied: no recursion and no path that grows with the
    # depth, which a payload chooses.
    pending = [root]
    mark = os.urandom(4).hex()
    moved = 0
    while pending:
        directory = pending.pop()
        try:
            directory.chmod(0o700)
            entries = list(os.scandir(directory))
        except FileNotFoundError:
            continue
        for entry in entries:
            moved += 1
            grave = root / f".{mark}-{moved}"
            if _bury(entry, grave):
                pending.append(grave)
        if directory != root:
            _remove(directory)
    _remove(root)


def _bury(entry: os.DirEntry[str], grave: Path) -> bool:
    """Removes a file, or moves a directory to `grave`, which is still to be emptied (True)."""
    try:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)  # noqa: PTH108
            return False
        os.chmod(entry.path, 0o700)  # noqa: PTH101 - a move rewrites the directory's own `..`
        os.rename(entry.path, grave)  # noqa: PTH104
    except FileNotFoundError:
        return False
    return True


def _remove(directory: Path) -> None:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return
