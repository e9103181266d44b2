"""The attendant's outer process: starts the container, lets the keeper in, and cleans up after both."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from . import kernel, processes, removal, storage, wire
from .keeper import Keeper

_GREETING = b"hpcroll\n"
_JOINED = ("net", "ipc", "uts", "cgroup", "mnt")
_LOG_BYTES = 2000
_FOR_THE_WORKER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean the worker where they are sent to all processes of a job step."""
_OF_THE_RUNTIME = frozenset({"PROMPT_COMMAND", "PS1", "PWD", "OLDPWD", "SHLVL", "_"})


class StartFailed(Exception):
    """The container did not come up."""


class Container:
    """The runtime's process (bwrap, apptainer) with `cat` inside, which keeps the namespaces alive.

    `cat` ends when this process does, however it ends: its standard input is then closed.
    """

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        inner, self._stdin = os.pipe()
        self._stdout, outer = os.pipe()
        self._log = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate((inner, outer, self._log))]
        self.pid = os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True)
        os.close(inner)
        os.close(outer)

    def await_up(self, timeout_s: float) -> int:
        """Returns the pid of `cat` once it answers; raises `StartFailed` with the runtime's last words."""
        os.write(self._stdin, _GREETING)
        deadline_s = time.monotonic() + timeout_s
        answer = b""
        while answer != _GREETING:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._stdout], [], [], left_s)[0]:
                raise StartFailed(f"not up after {timeout_s:g} s: {self.last_words()}")
            data = os.read(self._stdout, len(_GREETING) - len(answer))
            if not data:
                raise StartFailed(self.last_words())
            answer += data
        return self._innermost()

    def _innermost(self) -> int:
        outside = kernel.pid_namespace("self")
        for pid in reversed(processes.descendants(self.pid)):
            if kernel.pid_namespace(pid) not in (None, outside):
                return pid
        raise StartFailed("the container has no pid namespace of its own")

    def last_words(self) -> str:
        """The end of what the runtime wrote to its standard error."""
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace").strip()
        return text or "the container runtime ended without a word"

    def end(self) -> None:
        """Kills and reaps it and everything that it started, servers of its file systems too."""
        while True:
            processes.kill_descendants()
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


class Doors:
    """Descriptors of the namespaces and the root of process `pid`, opened before any of them is entered."""

    def __init__(self, pid: int) -> None:
        self.root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY)
        self.pid = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
        self.others = {
            kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in _JOINED if _differs(pid, kind)
        }
        payload = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        # The runtime may have put the payload in a further user namespace, which owns nothing of this.
        self.user = kernel.owner_of(self.others["mnt"])
        self.payload = None if os.path.sameopenfile(self.user, payload) else payload

    def enter_outer(self) -> None:
        kernel.setns(self.user, "user")
        kernel.setns(self.pid, "pid")  # counts for children only

    def enter_inner(self) -> None:
        for kind, fd in self.others.items():
            kernel.setns(fd, kind)
            os.close(fd)
        os.fchdir(self.root)
        os.chroot(".")
        os.chdir("/")
        os.close(self.root)


def main() -> None:
    """Serves the sandbox whose control socket is the descriptor in `argv[1]`."""
    # Slurm signals every process of a step before it ends; a sandbox ends when its worker says so.
    for number in _FOR_THE_WORKER:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    sock = socket.socket(fileno=int(sys.argv[1]))
    frame = wire.receive(sock)
    if frame is None:
        return
    settings = frame[0]
    scratch = Path(settings["scratch"])
    try:
        if settings["container"] is None:
            _serve(sock, settings, None)
            _await_lanes()
        else:
            _run(sock, settings, scratch)
    finally:
        # Here and not only in the worker: this process is in the sandbox's user namespace, whose other
        # users' files nobody else may remove, and it is still there where the worker was killed.
        removal.remove_tree(scratch)


def _run(sock: socket.socket, settings: dict[str, Any], scratch: Path) -> None:
    kernel.adopt_orphans()  # servers that the runtime detaches stay ours to end
    container = Container(settings["container"], settings["container_env"], scratch / "start.log")
    try:
        _attend(sock, settings, container)
    except (OSError, StartFailed) as error:
        wire.send(sock, {"error": str(error)})
    finally:
        container.end()


def _attend(sock: socket.socket, settings: dict[str, Any], container: Container) -> None:
    pid = container.await_up(settings["start_timeout_s"])
    settings["env"] = _environment_of(pid) | settings["env"]
    doors = Doors(pid)
    doors.enter_outer()
    keeper = os.fork()
    if keeper == 0:
        _be_keeper(sock, settings, doors)
    # Only the keeper holds it now: its death is the end of the control socket, for the worker to see.
    sock.close()
    os.waitpid(keeper, 0)


def _be_keeper(sock: socket.socket, settings: dict[str, Any], doors: Doors) -> None:
    """Turns this forked process into the keeper; never returns."""
    code = 1
    try:
        kernel.die_with_parent(signal.SIGKILL)
        doors.enter_inner()
        _serve(sock, settings, doors)
        code = 0
    except (OSError, StartFailed) as error:
        wire.send(sock, {"error": str(error)})
    finally:
        os._exit(code)


def _serve(sock: socket.socket, settings: dict[str, Any], doors: Doors | None) -> None:
    kernel.hide_memory()
    if doors is not None:
        if "net" in doors.others:
            kernel.raise_loopback()
        if settings["memory_disk"] is not None:
            storage.mount_memory_disk(**settings["memory_disk"])
    wire.send(sock, {"ready": True, "env": settings["env"]})
    Keeper(
        sock,
        settings,
        pid_fd=None if doors is None else doors.pid,
        user_fd=None if doors is None else doors.payload,
    ).serve()


def _await_lanes() -> None:
    """Waits for the lanes without a namespace: each kills its own tree once the worker has hung up."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _environment_of(pid: int) -> dict[str, str]:
    """What the image itself sets (its PATH above all), without the runtime's own variables."""
    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry)
        env = {os.fsdecode(name): os.fsdecode(value) for name, _equals, value in pairs}
    return {
        name: value
        for name, value in env.items()
        if name not in _OF_THE_RUNTIME and not name.startswith(("APPTAINER_", "SINGULARITY_"))
    }


def _differs(pid: int, kind: str) -> bool:
    try:
        return not Path(f"/proc/{pid}/ns/{kind}").samefile(f"/proc/self/ns/{kind}")
    except FileNotFoundError:  # a kernel without this kind of namespace
        return False
