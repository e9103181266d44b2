"""The shared file system: names, atomic writes, probes and node-local locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcroll.fs.atomic import (
    fsync_directory,
    list_names,
    make_directories,
    publish,
    read_fresh,
    replace,
    write_all,
)
from hpcroll.fs.links import claim_name, read_token
from hpcroll.fs.mounts import filesystem_type, is_node_local
from hpcroll.fs.paths import FANOUT_BITS, RunPaths

if TYPE_CHECKING:
    from hpcroll.fs.probe import FilesystemProbe, probe_filesystem


def __getattr__(name: str) -> Any:
    # A probe's result is a model, and building models costs more than all else that a reader imports.
    if name not in ("FilesystemProbe", "probe_filesystem"):
        raise AttributeError(f"module 'hpcroll.fs' has no attribute {name!r}")
    from hpcroll.fs import probe

    return getattr(probe, name)


__all__ = [
    "FANOUT_BITS",
    "FilesystemProbe",
    "RunPaths",
    "claim_name",
    "filesystem_type",
    "fsync_directory",
    "is_node_local",
    "list_names",
    "make_directories",
    "probe_filesystem",
    "publish",
    "read_fresh",
    "read_token",
    "replace",
    "write_all",
]
