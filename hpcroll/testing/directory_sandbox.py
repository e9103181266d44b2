"""A sandbox that is only a directory: for tests of harnesses and handlers, never for payloads."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcroll.errors import IsolationUnavailableError, SandboxError
from hpcroll.sandboxes.base import ExecResult, SandboxSpec

if sys.version_info >= (3, 12):
    import tarfile
else:
    # Extraction filters came with 3.11.4; distributions of 3.11 ship older ones.
    from backports import tarfile


class DirectorySandbox:
    """Runs commands as this user in `root`, isolated from nothing; absolute paths fall below `root`."""

    def __init__(self, root: Path, *, name: str = "directory") -> None:
        self.spec = SandboxSpec(name=name, image=None)
        self.workdir = str(root)
        self.commands: list[tuple[str, ...]] = []
        """Every argv that was run."""
        self._root = root
        self._stopped = False

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
        self._check()
        self.commands.append(tuple(argv))
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self._inside(cwd) if cwd is not None else self._root,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": self.workdir, **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        timed_out = False
        conversation = asyncio.ensure_future(process.communicate(stdin))
        try:
            done, _ = await asyncio.wait({conversation}, timeout=timeout_s)
            timed_out = not done
        finally:
            _kill_group(process.pid)
            # When cancelled too: a process that nobody waited for outlives the event loop.
            stdout, stderr = await conversation
        return ExecResult(
            exit_code=None if timed_out else process.returncode,
            stdout=_cut(stdout, output_bytes),
            stderr=_cut(stderr, output_bytes),
            stdout_bytes=len(stdout),
            stderr_bytes=len(stderr),
            duration_s=time.monotonic() - started,
            timed_out=timed_out,
        )

    async def put(self, data: bytes, path: str, *, mode: int = 0o644) -> None:
        self._check()
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def put_tree(self, archive: Path, path: str) -> None:
        self._check()
        with tarfile.open(archive) as tar:
            tar.extractall(self._inside(path), filter="data")

    async def get(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        self._check()
        data = self._inside(path).read_bytes()
        if len(data) > limit_bytes:
            raise SandboxError(f"{path} has {len(data)} bytes, the limit is {limit_bytes}")
        return data

    async def listen(self, port: int) -> socket.socket:
        raise IsolationUnavailableError("a directory has no network namespace to listen in")

    async def alive(self) -> bool:
        return not self._stopped

    async def stop(self) -> None:
        self._stopped = True

    def _check(self) -> None:
        if self._stopped:
            raise SandboxError(f"sandbox {self.spec.name} was stopped")

    def _inside(self, path: str) -> Path:
        given = Path(path)
        return given if given.is_relative_to(self._root) else self._root / path.lstrip("/")


def _cut(stream: bytes, limit: int) -> bytes:
    half = limit // 2
    return stream if len(stream) <= limit else stream[: limit - half] + stream[len(stream) - half :]


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
