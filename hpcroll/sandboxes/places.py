"""What every sandbox of this package has inside: its writable places, its environment, its binds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcroll.config import SandboxConfig
from hpcroll.errors import ConfigError
from hpcroll.sandboxes.base import SandboxSpec

WORKDIR = "/work"
"""Where commands start; empty and writable in every new sandbox."""
HOME = "/home/agent"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = "agent"

WRITABLE = {"work": WORKDIR, "home": HOME, "tmp": "/tmp", "var-tmp": "/var/tmp", "shm": "/dev/shm"}
"""Directory below the sandbox's scratch, and where it appears inside."""

_COUNTED_SINCE = (5, 14)
"""Kernel version from which RLIMIT_NPROC counts each user namespace by itself."""


def make(scratch: Path) -> list[tuple[Path, str]]:
    """Makes the writable places below `scratch`; pairs of the node's path and the path inside."""
    made = []
    for name, inside in WRITABLE.items():
        path = scratch / name
        path.mkdir()
        # The sticky bit as everywhere for shared temporary directories: programs check for it.
        path.chmod(0o1777 if name.endswith(("tmp", "shm")) else 0o755)
        made.append((path, inside))
    return made


def etc_files(scratch: Path, image: Path | None = None) -> list[Path]:
    """Files for `/etc` that name the payload's user before the image's own, and no host but this one."""
    uid, gid = os.getuid(), os.getgid()
    passwd, group = _lines(image, "passwd"), _lines(image, "group")
    if uid != 0 and not passwd:
        passwd, group = ["root:x:0:0:root:/root:/bin/sh"], ["root:x:0:"]
    files = {
        "passwd": [f"{USER}:x:{uid}:{gid}:agent:{HOME}:/bin/sh", *passwd],
        "group": [f"{USER}:x:{gid}:", *group],
        "hosts": ["127.0.0.1 localhost"],
        "nsswitch.conf": ["passwd: files", "group: files", "hosts: files"],
    }
    directory = scratch / "etc"
    directory.mkdir()
    written = []
    for name, lines in files.items():
        path = directory / name
        path.write_text("".join(f"{line}\n" for line in lines))
        written.append(path)
    return written


def _lines(image: Path | None, name: str) -> list[str]:
    path = None if image is None else image / "etc" / name
    if path is None or path.is_symlink() or not path.is_file():  # a link would lead to the node's file
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def memory_disk(config: SandboxConfig) -> dict[str, Any] | None:
    """The memory disk that holds the writable places where `disk_mb` limits them."""
    if config.disk_mb is None:
        return None
    return {"size_mb": config.disk_mb, "places": list(WRITABLE.values())}


def environment(config: SandboxConfig, spec: SandboxSpec, *, home: str = HOME) -> dict[str, str]:
    """Environment of every command, over what the image sets itself; nothing of the node's."""
    own = {"HOME": home, "USER": USER, "LOGNAME": USER, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    return own | config.env | dict(spec.env)


def binds(config: SandboxConfig, spec: SandboxSpec) -> Iterator[tuple[Path, str]]:
    """The further read-only binds, the config's first; `ConfigError` where a source is missing."""
    pairs = [parse_bind(text) for text in config.binds]
    for source, target in (*pairs, *spec.binds):
        if not source.exists():
            raise ConfigError(f"bind source {source} does not exist on this node")
        yield source, target


def check(config: SandboxConfig) -> None:
    """Raises `ConfigError` for binds that no node could make."""
    for text in config.binds:
        parse_bind(text)


def parse_bind(text: str) -> tuple[Path, str]:
    """SOURCE or SOURCE:TARGET, both absolute; raises `ConfigError` otherwise."""
    source, colon, target = text.partition(":")
    target = target if colon else source
    if not source.startswith("/") or not target.startswith("/"):
        raise ConfigError(f"sandbox.binds: {text!r} must be SOURCE or SOURCE:TARGET, both absolute paths")
    return Path(source), target


def process_limit(config: SandboxConfig) -> int | None:
    """The process limit where this kernel can count a sandbox by itself, else None."""
    return config.processes if uncounted_reason() is None else None


def uncounted_reason() -> str | None:
    """Why processes of one sandbox cannot be counted here; None where they can."""
    if os.getuid() == 0:
        return "the kernel does not limit processes of root; run as an unprivileged user"
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if version is None or tuple(map(int, version.groups())) < _COUNTED_SINCE:
        return "kernels before 5.14 count a user's processes over the whole node"
    return None
