"""Tar archives of the node, opened so that a sandbox can unpack them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import zstandard

from hpcroll.errors import SandboxError

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@asynccontextmanager
async def opened(archive: Path) -> AsyncIterator[int]:
    """A descriptor that reads the tar archive: as it is, or decompressed where it is zstd.

    The attendant's standard library knows gzip, bzip2 and xz, but not zstd.
    """
    try:
        source = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"archive {archive} cannot be read: {error.strerror}") from error
    try:
        if os.pread(source, len(_ZSTD_MAGIC), 0) != _ZSTD_MAGIC:
            yield source
            return
        reader, writer = os.pipe()
        pump = asyncio.create_task(asyncio.to_thread(_decompress, source, writer, archive))
        try:
            yield reader
        finally:
            os.close(reader)  # the pump ends with EPIPE where the other side has given up
            await pump
    finally:
        os.close(source)


def _decompress(source: int, writer: int, archive: Path) -> None:
    try:
        # Closing the writer flushes it: the pipe may break there as well.
        with os.fdopen(writer, "wb") as target, os.fdopen(source, "rb", closefd=False) as file:
            zstandard.ZstdDecompressor().copy_stream(file, target)
    except BrokenPipeError:
        return
    except zstandard.ZstdError as error:
        raise SandboxError(f"archive {archive} does not decompress: {error}") from error
