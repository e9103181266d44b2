"""Who a local process is: a pid alone names another process once it was reused."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
        ticks = _started_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, ticks, socket.gethostname(), _boot_id())

    def here(self) -> bool:
        """Whether this is that host; elsewhere nothing can be told of the process."""
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Whether the process runs on this host (a zombie does not)."""
        return self.boot_id == _boot_id() and _started_ticks(self.pid) == self.started_ticks

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


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _started_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
