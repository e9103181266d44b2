"""Directory trees in a task's spec: a tar archive beside the task file, or a few files written inline."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from hpcroll.errors import ConfigError
from hpcroll.sandboxes.base import Sandbox

Tree = str | dict[str, str]
"""Path of a tar archive (plain, .gz or .zst), or the tree's files as {relative path: text}."""


def resolve_tree(tree: Tree, base: Path, *, field: str) -> Tree:
    """`tree` with an archive's path made absolute (relative to `base`).

    Raises `ConfigError` naming `field` where the archive is absent or an inline path leaves the tree.
    """
    if isinstance(tree, str):
        return str(resolve_file(tree, base, field=field))
    for path in tree:
        if not is_inside(path):
            raise ConfigError(f"{field}: {path!r} is not a relative path inside the tree")
    return tree


def resolve_file(path: str, base: Path, *, field: str) -> Path:
    """The absolute path of a file that a spec names; raises `ConfigError` where it is no readable file."""
    absolute = (base / path).absolute()
    if not absolute.is_file():
        raise ConfigError(f"{field}: {absolute} is not a file; paths are relative to the task file")
    return absolute


def is_inside(path: str) -> bool:
    """Whether `path` is relative and never climbs out of the directory it is relative to."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def tree_sha256(tree: Tree) -> str:
    """SHA-256 (hex) of what the tree is made from: the archive's bytes, or the inline files."""
    digest = hashlib.sha256()
    if isinstance(tree, str):
        with Path(tree).open("rb") as archive:
            while chunk := archive.read(1 << 20):
                digest.update(chunk)
    else:
        for path, text in sorted(tree.items()):
            digest.update(f"{len(path)}:{path}{len(text)}:{text}".encode())
    return digest.hexdigest()


async def put_tree(tree: Tree, sandbox: Sandbox, path: str) -> None:
    """The tree's files below directory `path` of the sandbox, over what is there already."""
    if isinstance(tree, str):
        await sandbox.put_tree(Path(tree), path)
        return
    for name, text in tree.items():
        await sandbox.put(text.encode(), f"{path}/{name}")
