"""The store of agent programs: one archive for each program and version, on the shared file system.

A tree of node_modules has tens of thousands of files; the shared file system sees one.
`<name>-<version>-<first 16 digits of its SHA-256>.tar.zst`
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from hpcroll.errors import ConfigError
from hpcroll.fs import fsync_directory, list_names

if sys.version_info >= (3, 12):
    import tarfile
else:
    # Extraction filters came with 3.11.4; distributions of 3.11 ship older ones.
    from backports import tarfile

_NAME = re.compile(r"(?P<name>[a-z0-9_]+)-(?P<version>[^-].*)-(?P<digest>[0-9a-f]{16})\.tar\.zst")
_LEVEL = 6
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Archive:
    """A program in a store."""

    path: Path
    name: str
    version: str
    digest: str
    """The first 16 digits of the file's SHA-256."""

    @property
    def stem(self) -> str:
        return f"{self.name}-{self.version}-{self.digest}"


def default_store() -> Path:
    """The user's own store: `$XDG_DATA_HOME/hpcroll/agents`, else below `~/.local/share`."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "hpcroll" / "agents"


def listing(store: Path) -> list[Archive]:
    """What `store` holds, by name and version; nothing where it does not exist."""
    found = (_NAME.fullmatch(name) for name in sorted(list_names(store)))
    return [
        Archive(store / match[0], match["name"], match["version"], match["digest"])
        for match in found
        if match is not None
    ]


def find(store: Path, name: str, version: str) -> Archive:
    """The archive of `name` in `version`, the newest of several; raises `ConfigError`."""
    if not store.is_absolute():
        raise ConfigError(f"harness.options.store: {store} must be an absolute path")
    found = [archive for archive in listing(store) if (archive.name, archive.version) == (name, version)]
    if not found:
        others = ", ".join(archive.version for archive in listing(store) if archive.name == name)
        raise ConfigError(
            f"agent {name} {version} is not installed in {store}"
            f"{f' (there: {others})' if others else ''}: run `hpcroll agents install {name} --store {store}`"
        )
    return max(found, key=lambda archive: archive.path.stat().st_mtime)


def publish(tree: Path, store: Path, *, name: str, version: str) -> Archive:
    """Packs directory `tree` into `store`, where the archive appears whole and durable, or not at all.

    Equal trees give equal archives: names are sorted, times and owners left out, nothing is writable.
    """
    store.mkdir(parents=True, exist_ok=True)
    part = store / f".{name}-{version}.{secrets.token_hex(6)}"
    try:
        with part.open("xb") as file:
            _pack(tree, file)
            file.flush()
            os.fsync(file.fileno())
        digest = file_digest(part)[:16]
        archive = Archive(store / f"{name}-{version}-{digest}.tar.zst", name, version, digest)
        part.chmod(0o644)
        part.replace(archive.path)
        fsync_directory(store)
    finally:
        part.unlink(missing_ok=True)
    return archive


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pack(tree: Path, file: IO[bytes]) -> None:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=-1)
    with (
        compressor.stream_writer(file, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in sorted(tree.rglob("*")):
            tar.add(path, str(path.relative_to(tree)), recursive=False, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    if member.isdir() or member.mode & stat.S_IXUSR:
        member.mode = 0o755 if member.isdir() else 0o555
    else:
        member.mode = 0o444
    return member
