"""Removes what payloads left on the node's disk."""

from __future__ import annotations

import os
from pathlib import Path


def remove_tree(root: Path) -> None:
    """Removes `root` and everything below it, whatever depth and modes a payload gave its directories.

    Symbolic links are removed, never followed. Raises `OSError` for what belongs to another user.
    """
    # Each directory is moved up before it is emptied: no recursion and no path that grows with the
    # depth, which a payload chooses.
    if not root.is_dir():
        return
    pending = [root]
    moved = 0
    mark = os.urandom(4).hex()
    while pending:
        directory = pending.pop()
        directory.chmod(0o700)
        for entry in list(os.scandir(directory)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)  # noqa: PTH108
                continue
            os.chmod(entry.path, 0o700)  # noqa: PTH101 - a move rewrites the directory's own `..`
            moved += 1
            grave = root / f".{mark}-{moved}"
            os.rename(entry.path, grave)  # noqa: PTH104
            pending.append(grave)
        if directory != root:
            directory.rmdir()
    root.rmdir()
