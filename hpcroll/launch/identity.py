"""Who a local process is: a pid alone names another process once it was reused."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcroll.spool import started_ticks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMES_OF_MANY = frozenset({"localhost", "localhost.localdomain"})


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of one boot of one host, by pid and start time (clock ticks since boot)."""

    pid: int
    started_ticks: int
    host: str
    boot_id: str

    @classmethod
    def read(cls, path: Path) -> ProcessIdentity | None:
        """The identity in file `path`, None where there is no such file."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of running process `pid`; raises `ProcessLookupError` where there is none."""
        ticks = started_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, ticks, socket.gethostname(), this_boot())

    def here(self) -> bool:
        """Whether this is that host; elsewhere nothing can be told of the process."""
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Whether the process runs on this host (a zombie does not)."""
        return self.boot_id == this_boot() and started_ticks(self.pid) == self.started_ticks

    def terminate(self) -> None:
        """Sends SIGTERM unless the process is gone; its pid cannot have been reused meanwhile."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor pins the process: checked after it was opened, it cannot change any more.
            if self.alive():
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        finally:
            os.close(descriptor)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def host_is_this(host: str) -> bool:
    """Whether `host` names this host and no other."""
    return host == socket.gethostname() and host not in _NAMES_OF_MANY


def this_boot() -> str:
    """The id of this host's current boot."""
    return _BOOT_ID.read_text().strip()
