"""A lane: process 1 of a pid namespace of its own, which runs one command of a sandbox after another."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from . import files, memory, wire
from .streams import Capture

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a command that could not be started, as shells give them."""

# Slurm signals every process of a step before its end; payloads live on until they are stopped.
_IGNORED = frozenset({signal.SIGUSR1, signal.SIGUSR2})

_MEMORY_NOTE = b"hpcroll: the sandbox used more memory than its limit; its largest process was killed\n"

_ROOT_IS_GONE = frozenset({errno.ENOTCONN, errno.EIO, errno.ESTALE})
"""How a file system fails whose server has died."""

Reply = tuple[dict[str, Any], bytes]


class Lane:
    """Serves the requests that come in on one socket, one at a time.

    After every command its namespace is empty but for this process: whatever the command left behind,
    in whatever session or process group, is dead before the reply goes out.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        env: dict[str, str],
        kill_tree: Callable[[], None],
        workdir: str,
        memory_kills: mmap.mmap,
    ) -> None:
        self._sock = sock
        self._env = env
        self._kill_tree = kill_tree
        self._workdir = workdir
        self._memory_kills = memory_kills
        self._null = os.open("/dev/null", os.O_RDWR)
        self._wake, wake_writer = os.pipe()
        for fd in (self._wake, wake_writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        # Python ignores SIGPIPE, the attendant more, and who started the worker perhaps others; ignoring
        # is inherited, and programs expect the defaults.
        ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
        self._default = [int(number) for number in ignored if number not in _IGNORED]

    def serve(self) -> None:
        """Answers requests until the worker closes the socket."""
        while True:
            frame = wire.receive(self._sock)
            if frame is None:
                return
            request, _body, fds = frame
            if request["op"] == "kill":
                continue  # came too late: its command has ended and been answered
            try:
                reply, body = self._answer(request, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            wire.send(self._sock, reply, body)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> Reply:
        kind = request["op"]
        if kind == "exec":
            return self._exec(request, fds)
        try:
            return files.serve(request, fds)
        except OSError as error:
            return {"errno": error.errno, "error": f"{error.strerror or error}"}, b""
        except (files.FileRefused, ValueError) as error:
            return {"error": str(error)}, b""

    def _exec(self, request: dict[str, Any], fds: list[int]) -> Reply:
        cap_bytes = request["output_bytes"]
        out, err = Capture(cap_bytes), Capture(cap_bytes)
        kills = memory.count_kills(self._memory_kills)
        try:
            started_s = time.monotonic()
            try:
                pid = self._spawn(request, fds[0] if fds else self._null, out.writer, err.writer)
            except OSError as error:
                if error.errno in _ROOT_IS_GONE:
                    return {"error": f"its root file system is gone: {error.strerror}"}, b""
                code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
                err.add(f"hpcroll: {error.filename}: {error.strerror}\n".encode(errors="replace"))
                return self._result(code, out, err, 0.0)
            except ValueError as error:  # a NUL byte, or what no file system can spell
                err.add(f"hpcroll: {error}\n".encode(errors="replace"))
                return self._result(NOT_EXECUTABLE, out, err, 0.0)
            out.close_writer()
            err.close_writer()
            status, ending = self._watch(pid, out, err, started_s + request["timeout_s"])
            duration_s = time.monotonic() - started_s
            status = self._bury(pid, status)
            out.drain()
            err.drain()
            if memory.count_kills(self._memory_kills) > kills:
                err.add(
                    b"hpcroll: the sandbox used more memory than its limit; its largest process was killed\n"
                )
            code = os.waitstatus_to_exitcode(status)
            return self._result(code, out, err, duration_s, ending=ending)
        finally:
            out.close()
            err.close()

    def _result(
        self, code: int, out: Capture, err: Capture, duration_s: float, ending: str | None = None
    ) -> Reply:
        stdout, stderr = out.kept(), err.kept()
        reply = {
            "exit_code": None if ending else code,
            "ending": ending,
            "stdout": len(stdout),
            "stdout_bytes": out.total_bytes,
            "stderr_bytes": err.total_bytes,
            "duration_s": duration_s,
        }
        return reply, stdout + stderr

    def _spawn(self, request: dict[str, Any], stdin: int, stdout: int, stderr: int) -> int:
        argv = request["argv"]
        env = self._env | request["env"]
        os.chdir(request["cwd"] or self._workdir)
        streams = enumerate((stdin, stdout, stderr))
        # posix_spawn shares memory until the exec (like vfork): its cost does not grow with this process.
        return os.posix_spawn(
            _program(argv[0], env.get("PATH", "")),
            argv,
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in streams],
            setsid=True,
            setsigmask=(),
            setsigdef=self._default,
        )

    def _watch(
        self, pid: int, out: Capture, err: Capture, deadline_s: float
    ) -> tuple[int | None, str | None]:
        """Reads both streams until `pid` ends, its time is over, or the worker wants it dead.

        Returns its wait status, None where it is still to be killed, and why.
        """
        poll = select.poll()
        streams = {out.reader: out, err.reader: err}
        for fd in (self._sock.fileno(), self._wake, *streams):
            poll.register(fd, select.POLLIN)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None, "timeout"
            # Capped: poll takes its time in an int of milliseconds.
            for fd, _event in poll.poll(min(left_s, 3600.0) * 1000):
                if fd in streams:
                    if not streams[fd].read():
                        poll.unregister(fd)
                elif fd == self._wake:
                    _empty(fd)
                    status = _reap(pid)
                    if status is not None:
                        return status, None
                else:
                    # The worker gives the command up, or is gone itself (then serve() ends next).
                    wire.receive(self._sock)
                    return None, "cancelled"

    def _bury(self, pid: int, status: int | None) -> int:
        """Kills and reaps everything that is left; returns the wait status of `pid`."""
        while True:
            try:
                # Without a living child the namespace is empty: orphans become children of this process.
                child, child_status = os.waitpid(-1, os.WNOHANG)
                if child == 0:
                    self._kill_tree()
                    child, child_status = os.waitpid(-1, 0)
            except ChildProcessError:
                _empty(self._wake)
                assert status is not None
                return status
            if child == pid:
                status = child_status


def _program(name: str, path: str) -> str:
    """The file that `name` means on `path`, as `execvp` would look for it."""
    if "/" in name:
        return name
    for directory in path.split(":"):
        candidate = f"{directory or '.'}/{name}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):  # noqa: PTH112
            return candidate
    raise FileNotFoundError(2, "command not found", name)


def _reap(pid: int) -> int | None:
    """Reaps what has ended, orphans too; the wait status of `pid` where it was among them."""
    found = None
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if child == 0:
            return found
        if child == pid:
            found = status


def _empty(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def set_limits(*, file_mb: int, processes: int | None) -> None:
    """Sets the resource limits that every command of this lane inherits."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, file_mb << 20)
    if processes is not None:
        _lower(resource.RLIMIT_NPROC, processes)


def _lower(kind: int, value: int) -> None:
    _soft, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
