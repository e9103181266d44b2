"""A sandbox without any isolation: a directory and real processes, for tests of what runs inside one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tarfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import zstandard

from hpcroll.errors import IsolationUnavailableError, SandboxError
from hpcroll.sandboxes.base import ExecResult, SandboxSpec


class DirectorySandbox:
    """Runs commands in `root`, which is its work directory."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        self.spec = SandboxSpec(name=root.name, image=None)
        self.workdir = str(root)
        self.commands: list[tuple[str, ...]] = []
        self._root = root

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> ExecResult:
        await self._check()
        self.commands.append(tuple(argv))
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd or self.workdir,
            env={"PATH": os.environ["PATH"], **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        timed_out = False
        talk = asyncio.ensure_future(process.communicate(stdin))
        try:
            out, err = await asyncio.wait_for(asyncio.shield(talk), timeout_s)
        except TimeoutError:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            out, err = await talk
        code = None if timed_out else process.returncode
        return ExecResult(
            exit_code=code,
            stdout=out[-output_bytes:],
            stderr=err[-output_bytes:],
            stdout_bytes=len(out),
            stderr_bytes=len(err),
            duration_s=time.monotonic() - started_s,
            timed_out=timed_out,
        )

    async def put(self, data: bytes, path: str, *, mode: int = 0o644) -> None:
        await self._check()
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def put_tree(self, archive: Path, path: str) -> None:
        await self._check()
        data = archive.read_bytes()
        if archive.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        with tarfile.open(fileobj=BytesIO(data)) as tar:
            tar.extractall(path, filter="data")

    async def get(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        await self._check()
        target = self._root / path
        if target.is_dir():
            raise SandboxError(f"{path} is a directory")
        data = target.read_bytes()
        if len(data) > limit_bytes:
            raise SandboxError(f"{path} has more than {limit_bytes} bytes")
        return data

    async def listen(self, port: int) -> socket.socket:
        raise IsolationUnavailableError("a directory has no network of its own")

    async def alive(self) -> bool:
        return self._root.exists()

    async def stop(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    async def _check(self) -> None:
        if not self._root.exists():
            raise SandboxError(f"sandbox {self.spec.name} is gone")


class FreshDirectories:
    """Hands out new sandboxes below `root`; `started` keeps them all."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.started: list[DirectorySandbox] = []

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[DirectorySandbox]:
        sandbox = DirectorySandbox(self._root / f"fresh{len(self.started)}")
        self.started.append(sandbox)
        try:
            yield sandbox
        finally:
            await sandbox.stop()
