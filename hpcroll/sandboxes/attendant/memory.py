"""The memory limit of a sandbox where the node gives no cgroup: watched, and enforced by killing."""

from __future__ import annotations

import mmap
import os
import signal
import struct

_COUNTER = struct.Struct("=Q")


class MemoryWatch:
    """Kills the largest process of the sandbox while all of them together use more than the limit.

    Counts anonymous and shared memory that is mapped, as `/proc/<pid>/status` gives it. A burst between
    two checks can overshoot; only a cgroup could stop that.
    """

    def __init__(self, limit_mb: int, kills: mmap.mmap) -> None:
        self._limit_kb = limit_mb << 10
        self._kills = kills
        self._spared = {1, os.getpid()}

    def spare(self, pid: int) -> None:
        """Never kills `pid`: it is a lane, not a payload."""
        self._spared.add(pid)

    def check(self) -> None:
        """Kills one process where the limit is exceeded."""
        sizes_kb = {pid: size for pid in self._payloads() if (size := _size_kb(pid))}
        if sum(sizes_kb.values()) <= self._limit_kb:
            return
        largest = max(sizes_kb, key=sizes_kb.__getitem__)
        try:
            os.kill(largest, signal.SIGKILL)
        except ProcessLookupError:
            return
        _COUNTER.pack_into(self._kills, 0, count_kills(self._kills) + 1)

    def _payloads(self) -> list[int]:
        names = (name for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
        return [pid for pid in map(int, names) if pid not in self._spared]


def count_kills(kills: mmap.mmap) -> int:
    """How many processes the watch has killed so far; read by lanes, which share the page."""
    return int(_COUNTER.unpack_from(kills, 0)[0])


def _size_kb(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            lines = file.read().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))
