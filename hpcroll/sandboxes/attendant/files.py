"""Files in and out of a sandbox, handled inside it: no symbolic link leads out of its own root."""

from __future__ import annotations

# tarfile imports these when an archive needs them: too late, the node's files are out of sight then.
import bz2 as _bz2  # noqa: F401
import gzip as _gzip  # noqa: F401
import lzma as _lzma  # noqa: F401
import os
import stat
import tarfile
from typing import Any

_CHUNK_BYTES = 1 << 20


class FileRefused(Exception):
    """A file operation that is refused, in words for the caller."""


def serve(request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], bytes]:
    """Does the file operation `request`; raises `OSError` or `FileRefused`."""
    kind, path = request["op"], request["path"]
    if kind == "get":
        return {}, _get(path, request["limit_bytes"])
    if kind == "put":
        _put(path, fds[0], request["mode"])
    elif kind == "put_tree":
        _unpack(path, fds[0])
    else:
        raise FileRefused(f"unknown operation {kind!r}")
    return {}, b""


def _get(path: str, limit_bytes: int) -> bytes:
    # Non-blocking: the open of a pipe that a payload put there would wait for its writer forever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(fd, "rb") as file:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(21, "is a directory", path)
        if not stat.S_ISREG(kind):
            raise FileRefused("is not a regular file")
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise FileRefused(f"is larger than {limit_bytes} bytes")
    return data


def _put(path: str, source: int, mode: int) -> None:
    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - paths of the image, not of the node
    # Written beside and renamed over: whatever a payload put at `path` is replaced, never written through.
    beside = f"{directory}/.{os.urandom(8).hex()}.part"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            while data := os.read(source, _CHUNK_BYTES):
                file.write(data)
            os.fchmod(fd, mode)
        os.rename(beside, f"{directory}/{name}")  # noqa: PTH104
    except BaseException:
        os.unlink(beside)  # noqa: PTH108
        raise


def _unpack(path: str, source: int) -> None:
    os.makedirs(path, exist_ok=True)  # noqa: PTH103
    try:
        with os.fdopen(os.dup(source), "rb") as file, tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise FileRefused(
                        f"holds {member.name!r}, which lies outside the archive's own directory"
                    )
                if member.isdev():
                    raise FileRefused(f"holds the device or pipe {member.name!r}")
                member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
                # A directory must let its own content be unpacked, and everything must be removable.
                member.mode |= stat.S_IRWXU if member.isdir() else stat.S_IRUSR | stat.S_IWUSR
                _extract(archive, member, path)
    except tarfile.TarError as error:
        raise FileRefused(f"does not unpack: {error}") from error


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    if hasattr(tarfile, "tar_filter"):
        archive.extract(member, path, filter="tar")
    else:  # Python before 3.11.4
        archive.extract(member, path)
