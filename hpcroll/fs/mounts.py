"""Which file system a path lies on, as the kernel names it."""

from __future__ import annotations

from pathlib import Path

LOCAL_TYPES = frozenset(
    {
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "fuse.fuse-overlayfs",
        "fuseblk",
        "jfs",
        "overlay",
        "ramfs",
        "reiserfs",
        "rootfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""File systems of one node. A list of what is known to be local fails closed: sites have file systems that
no list of shared ones names."""


def filesystem_type(path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that `path` (or its nearest existing parent) lies on, e.g. `ext4`."""
    resolved = path.resolve()
    best, best_type = -1, "unknown"
    for line in mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields, _, tail = line.partition(" - ")
        mount_point = Path(_unescape(fields.split(" ")[4]))
        depth = len(mount_point.parts)
        # A later mount on the same point hides the earlier one.
        if depth >= best and resolved.is_relative_to(mount_point):
            best, best_type = depth, tail.split(" ")[0]
    return best_type


def is_node_local(type_name: str) -> bool:
    """True where only this node mounts a file system of this type."""
    return type_name in LOCAL_TYPES


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
