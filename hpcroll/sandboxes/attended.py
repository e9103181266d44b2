"""A sandbox that an attendant stands beside: what all providers of this package start."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import posixpath
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcroll.errors import IsolationUnavailableError, SandboxError
from hpcroll.sandboxes import archive as archives
from hpcroll.sandboxes.attendance import Attendance
from hpcroll.sandboxes.attendant.removal import remove_tree
from hpcroll.sandboxes.base import ExecResult, SandboxSpec
from hpcroll.sandboxes.channel import Channel, Reply
from hpcroll.sandboxes.starts import Starts

_log = logging.getLogger(__name__)

_ENTRY = "import sys; sys.path.append(sys.argv.pop(1)); from attendant.main import main; main()"
_GRACE_S = 30.0
"""Beyond a command's own time-out: how long its tree may take to die before the sandbox counts as gone."""
_FILE_S = 900.0
"""Longest that one file operation may take."""
_ALIVE_S = 10.0
_STOP_S = 30.0
"""How long an attendant may take to kill everything and to remove the scratch."""
_IDLE_LANES = 8
"""Lanes kept for the next commands; each is a small sleeping process."""


class AttendedSandbox:
    """A running sandbox with its attendant; implements `hpcroll.sandboxes.base.Sandbox`.

    Each command runs in a *lane*, a pid namespace of its own whose process 1 is ours. Lanes are made on
    demand and used again, so a command costs one message each way. The attendant and the container live
    and die together: whoever dies first, the kernel or the end of a socket takes the rest along.
    """

    def __init__(
        self, spec: SandboxSpec, workdir: str, scratch: Path, *, model_socket: bool, starts: Starts
    ) -> None:
        self.spec = spec
        self.workdir = workdir
        self._starts = starts  # it removes the worker's whole scratch once nobody refers to it
        self._scratch = scratch
        self._model_socket = model_socket
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Channel | None = None
        self._control_turn = asyncio.Lock()
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: SandboxSpec, scratch: Path, attendance: Attendance, *, starts: Starts
    ) -> AttendedSandbox:
        """A sandbox that answers; where it raises or is cancelled nothing of it is left, nor its scratch."""
        sandbox = cls(spec, attendance.workdir, scratch, model_socket=attendance.model_socket, starts=starts)
        try:
            await sandbox._attend(attendance)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def _attend(self, attendance: Attendance) -> None:
        inner, outer = socket.socketpair()
        with inner:
            argv = [sys.executable, "-I", "-S", "-B", "-c", _ENTRY, str(Path(__file__).parent)]
            # Its own session: a signal to the worker's process group is not meant for sandboxes.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; see _await_exit
                [*argv, str(inner.fileno())],
                pass_fds=[inner.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None,
                env={"LANG": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
        self._control = Channel(outer, self.spec.name)
        settings = {
            "container": attendance.container,
            "container_env": dict(attendance.container_env),
            "scratch": str(self._scratch),
            "env": dict(attendance.env),
            "workdir": attendance.workdir,
            "file_mb": attendance.file_mb,
            "processes": attendance.processes,
            "memory_mb": attendance.memory_mb,
            "memory_disk": attendance.memory_disk,
            "capabilities": attendance.capabilities,
            "start_timeout_s": attendance.start_timeout_s,
        }
        reply = await self._control.request(settings, timeout_s=attendance.start_timeout_s + _GRACE_S)
        if "error" in reply.header:
            raise SandboxError(f"sandbox {self.spec.name} did not start: {reply.header['error']}")
        self._idle.append(await self._make_lane())

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
        """Runs `argv`; see `Sandbox.exec`. A program that cannot be run exits with 126 or 127."""
        if not argv:
            raise ValueError("argv is empty")
        request = {
            "op": "exec",
            "argv": list(argv),
            "cwd": None if cwd is None else self._inside(cwd),
            "env": dict(env or {}),
            "timeout_s": timeout_s,
            "output_bytes": output_bytes,
        }
        reply = await self._ask_lane(request, stdin or None, timeout_s + _GRACE_S)
        if "error" in reply.header:
            raise SandboxError(f"sandbox {self.spec.name}: {reply.header['error']}")
        header, split = reply.header, reply.header["stdout"]
        return ExecResult(
            exit_code=header["exit_code"],
            stdout=reply.body[:split],
            stderr=reply.body[split:],
            stdout_bytes=header["stdout_bytes"],
            stderr_bytes=header["stderr_bytes"],
            duration_s=header["duration_s"],
            timed_out=header["ending"] == "timeout",
        )

    async def put(self, data: bytes, path: str, *, mode: int = 0o644) -> None:
        """Writes a file inside; whatever stood at `path` before is replaced, a symbolic link too."""
        request = {"op": "put", "path": self._inside(path), "mode": mode}
        self._check_file(await self._ask_lane(request, data, _FILE_S), path)

    async def put_tree(self, archive: Path, path: str) -> None:
        """Unpacks a tar archive below directory `path` inside; `SandboxError` where it does not unpack."""
        request = {"op": "put_tree", "path": self._inside(path)}
        async with archives.opened(archive) as fd:
            self._check_file(await self._ask_lane(request, fd, _FILE_S), f"{archive} at {path}")

    async def get(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        """The content of a regular file inside."""
        request = {"op": "get", "path": self._inside(path), "limit_bytes": limit_bytes}
        return self._check_file(await self._ask_lane(request, None, _FILE_S), path).body

    async def listen(self, port: int) -> socket.socket:
        """A listening socket on 127.0.0.1:`port` of the sandbox's own network."""
        if not self._model_socket:
            raise IsolationUnavailableError(
                f"sandbox {self.spec.name} shares the node's network, so no port in it is its own: "
                "set sandbox.network to false, or let the agent run outside"
            )
        reply = await self._ask_control({"op": "listen", "port": port})
        if "error" in reply.header:
            raise SandboxError(f"sandbox {self.spec.name}: port {port} inside: {reply.header['error']}")
        return socket.socket(fileno=reply.fds[0])

    async def alive(self) -> bool:
        """Whether the attendant, which dies with the container, answers, and the image can be read."""
        try:
            return "error" not in (await self._ask_control({"op": "ping"}, _ALIVE_S)).header
        except SandboxError:
            return False

    async def stop(self) -> None:
        """Ends everything inside and removes the scratch; returns once both are gone. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        # Shielded and waited for: a caller's cancellation must not leave half a sandbox behind, nor an
        # attendant that nobody reaps where the caller's loop ends right after.
        cancelled: asyncio.CancelledError | None = None
        while not self._stopping.done():
            try:
                await asyncio.shield(self._stopping)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        self._stopping.result()

    async def _stop(self) -> None:
        for channel in (*self._idle, *self._busy, self._control):
            if channel is not None:
                channel.close()
        self._idle.clear()
        if self._process is not None:
            await _await_exit(self._process, self.spec.name)
        try:
            await asyncio.to_thread(remove_tree, self._scratch)
        except OSError as error:
            _log.error("sandbox=%s scratch=%s not_removed=%s", self.spec.name, self._scratch, error)

    def _inside(self, path: str) -> str:
        return posixpath.join(self.workdir, path)

    def _check_file(self, reply: Reply, path: str) -> Reply:
        error = reply.header.get("error")
        if error is None:
            return reply
        number = reply.header.get("errno")
        if number in (2, 20):  # ENOENT, ENOTDIR
            raise FileNotFoundError(number, error, path)
        raise SandboxError(f"sandbox {self.spec.name}: {path}: {error}")

    async def _ask_control(self, request: dict[str, Any], timeout_s: float = _GRACE_S) -> Reply:
        async with self._control_turn:
            if self._control is None or self._control.closed:
                raise SandboxError(f"sandbox {self.spec.name} is gone")
            return await self._control.request(request, timeout_s=timeout_s)

    async def _make_lane(self) -> Channel:
        reply = await self._ask_control({"op": "lane"})
        if "error" in reply.header:
            raise SandboxError(f"sandbox {self.spec.name}: no process can be made: {reply.header['error']}")
        channel = Channel(socket.socket(fileno=reply.fds[0]), self.spec.name)
        try:
            ready = await channel.reply(channel.expect(), _GRACE_S)
            if "error" in ready.header:
                raise SandboxError(f"sandbox {self.spec.name}: {ready.header['error']}")
        except BaseException:
            channel.close()  # nobody else knows it yet, and the attendant waits for its end
            raise
        return channel

    async def _ask_lane(self, request: dict[str, Any], data: bytes | int | None, timeout_s: float) -> Reply:
        """Has a lane answer `request`; `data` is handed over as a descriptor to read from."""
        lane = self._idle.pop() if self._idle else await self._make_lane()
        self._busy.add(lane)
        fd = _memory_file(data) if isinstance(data, bytes) else data
        try:
            return await self._ask(lane, request, () if fd is None else (fd,), timeout_s)
        except BaseException:
            lane.close()  # whatever it still sends must not be taken for the next command's reply
            raise
        finally:
            if isinstance(data, bytes) and fd is not None:
                os.close(fd)
            self._busy.discard(lane)
            if lane.closed or self._stopping is not None or len(self._idle) >= _IDLE_LANES:
                lane.close()
            else:
                self._idle.append(lane)

    async def _ask(
        self, lane: Channel, request: dict[str, Any], fds: tuple[int, ...], timeout_s: float
    ) -> Reply:
        waiter = lane.expect()
        await lane.send(request, fds)
        try:
            return await lane.reply(waiter, timeout_s)
        except asyncio.CancelledError:
            if waiter.cancelled():  # else the reply came in the same moment: nothing is left to kill
                await asyncio.shield(self._give_up(lane))
            raise

    async def _give_up(self, lane: Channel) -> None:
        """Has the lane kill its command, and waits for the reply, which says that it is dead."""
        try:
            waiter = lane.expect()
            await lane.send({"op": "kill"})
            await lane.reply(waiter, _GRACE_S)
        except SandboxError as error:
            if self._stopping is None:
                _log.warning("sandbox=%s cancelled_command=%s", self.spec.name, error)


def _memory_file(data: bytes) -> int:
    """A sealed file in memory that holds `data`, to be read from its beginning."""
    fd = os.memfd_create("hpcroll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    # Sealed: a payload must not grow it into memory that no limit counts.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    return fd


async def _await_exit(process: subprocess.Popen[bytes], name: str) -> None:
    """Waits for the attendant's end, which the closed control socket asks for; kills it where it lingers."""
    deadline_s = asyncio.get_running_loop().time() + _STOP_S
    delay_s = 0.001
    while process.poll() is None:
        if asyncio.get_running_loop().time() > deadline_s:
            _log.error("sandbox=%s attendant=%d lingers=%gs killed=yes", name, process.pid, _STOP_S)
            process.kill()
            await asyncio.to_thread(process.wait)
            return
        # Polled: the loop's own child watcher costs a thread for each process on Python 3.11.
        await asyncio.sleep(delay_s)
        delay_s = min(0.02, 2 * delay_s)
