"""A sandbox's writable places on one memory disk of limited size."""

from __future__ import annotations

import os

from . import kernel


def mount_memory_disk(*, size_mb: int, places: list[str]) -> None:
    """Puts all of `places` on one tmpfs of `size_mb` MiB: past it, a write fails with ENOSPC."""
    first, *_ = places
    options = f"size={size_mb}m,mode=0755"
    kernel.mount("tmpfs", first, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    folders = []
    for index, place in enumerate(places):
        folder = f"{first}/{index}"
        os.mkdir(folder)  # noqa: PTH102
        os.chmod(folder, 0o1777 if place.endswith(("tmp", "shm")) else 0o755)  # noqa: PTH101
        folders.append((folder, place))
    # The first place last: it covers the folders that the others are bound from.
    for folder, place in reversed(folders):
        kernel.mount(folder, place, None, kernel.MS_BIND)
