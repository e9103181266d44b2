"""The attendant's inner process: it lives in the sandbox's namespaces, makes lanes and opens sockets."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

from . import kernel, lane, memory, processes, wire

_MEMORY_POLL_MS = 200
_OOM_SCORE = "500"
"""Payloads go before the worker and this process, should the node run out of memory."""


class Keeper:
    """Serves the worker's control socket until it is closed; then everything inside dies with it.

    Payloads run in pid namespaces below this process's own: they cannot name it, hence neither signal
    nor trace it.
    """

    def __init__(
        self, sock: socket.socket, settings: dict[str, Any], *, pid_fd: int | None, user_fd: int | None
    ) -> None:
        self._sock = sock
        self._settings = settings
        self._pid_fd = pid_fd
        self._user_fd = user_fd
        self._kills = mmap.mmap(-1, mmap.PAGESIZE)
        limit_mb = settings["memory_mb"]
        self._memory = None if limit_mb is None else memory.MemoryWatch(limit_mb, self._kills)
        # Lanes that end are reaped by the kernel.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            if poll.poll(None if self._memory is None else _MEMORY_POLL_MS):
                frame = wire.receive(self._sock)
                if frame is None:
                    return
                self._answer(frame[0])
            elif self._memory is not None:
                self._memory.check()

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            if request["op"] == "lane":
                handed = self._make_lane()
            elif request["op"] == "listen":
                handed = _listen(request["port"])
            else:
                os.listdir("/")  # noqa: PTH208 - fails where the server of the image's file system is dead
                wire.send(self._sock, {})
                return
        except OSError as error:
            wire.send(self._sock, {"errno": error.errno, "error": error.strerror or str(error)})
            return
        with handed:
            wire.send(self._sock, {}, fds=[handed.fileno()])

    def _make_lane(self) -> socket.socket:
        inner, outer = socket.socketpair()
        if self._pid_fd is not None:
            kernel.unshare(kernel.CLONE_NEWPID, "pid")
        try:
            pid = os.fork()
        except OSError:
            self._leave_new_namespace()
            raise
        if pid == 0:
            outer.close()
            self._be_lane(inner)
        self._leave_new_namespace()
        inner.close()
        if self._memory is not None:
            self._memory.spare(pid)
        return outer

    def _leave_new_namespace(self) -> None:
        # The next lane's namespace must lie beside the last one, not in it.
        if self._pid_fd is not None:
            kernel.setns(self._pid_fd, "pid")

    def _be_lane(self, sock: socket.socket) -> None:
        """Turns this forked process into a lane; never returns."""
        code = 1
        try:
            self._sock.close()
            served = self._enter_lane(sock)
            wire.send(sock, {"ready": True})
            served.serve()
            code = 0
        except ConnectionError:
            code = 0  # the worker is gone
        except OSError as error:
            wire.send(sock, {"error": str(error)})
        except BaseException:  # noqa: BLE001 - reported, and the process ends here
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)

    def _enter_lane(self, sock: socket.socket) -> lane.Lane:
        settings = self._settings
        if self._pid_fd is not None:
            # Before anything of a payload runs here: with its process 1 dies the whole namespace.
            kernel.die_with_parent(signal.SIGKILL)
            kill_tree = processes.kill_namespace
            kernel.unshare(kernel.CLONE_NEWNS, "mount")
            # Each lane sees its own processes only, under the numbers that its own getpid gives.
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        else:
            # Not to be killed from outside: this process alone knows what its payload started. It ends,
            # its tree before it, once the worker's end of the socket is closed.
            kill_tree = processes.kill_descendants
            kernel.adopt_orphans()
        kernel.hide_memory(False)
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
            file.write(_OOM_SCORE)
        kernel.hide_memory()
        if self._user_fd is not None:
            kernel.setns(self._user_fd, "user")
        lane.set_limits(file_mb=settings["file_mb"], processes=settings["processes"])
        kernel.drop_privileges(frozenset(settings["capabilities"]))
        return lane.Lane(
            sock,
            env=settings["env"],
            kill_tree=kill_tree,
            workdir=settings["workdir"],
            memory_kills=self._kills,
        )


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
