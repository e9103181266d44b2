"""What is kept of a command's output, however much it writes."""

from __future__ import annotations

import os

CHUNK_BYTES = 1 << 16
_LAST_BYTES = 8 << 20
"""Most that is still read of a stream once the command's whole tree is dead: more than any pipe holds."""


class Capture:
    """One output stream of a command: its first and last bytes, and how many there were.

    Memory stays within about twice `cap_bytes`, so that a payload's flood is the payload's problem.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.total_bytes = 0
        self._head_cap = cap_bytes - cap_bytes // 2
        self._tail_cap = cap_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()

    def read(self) -> bool:
        """Takes what is there, at most one chunk; False at the end of the stream."""
        try:
            data = os.read(self.reader, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self.add(data)
        return bool(data)

    def add(self, data: bytes) -> None:
        """Counts `data` and keeps what belongs to the beginning or the end."""
        self.total_bytes += len(data)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_cap + CHUNK_BYTES:
            del self._tail[: len(self._tail) - self._tail_cap]

    def drain(self) -> None:
        """Takes what the dead left in the pipe; never waits for its end.

        A payload may have handed the pipe's other end to a process of another command.
        """
        limit = self.total_bytes + _LAST_BYTES
        while self.total_bytes < limit:
            before = self.total_bytes
            if not self.read() or self.total_bytes == before:
                return

    def kept(self) -> bytes:
        """The first and the last bytes, at most the cap."""
        excess = max(0, len(self._tail) - self._tail_cap)
        return bytes(self._head + self._tail[excess:])

    def close_writer(self) -> None:
        """Closes the command's end here, so that only the command's tree holds it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        os.close(self.reader)
