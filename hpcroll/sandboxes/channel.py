"""The worker's end of a socket to an attendant or a lane: one request, one reply, in the event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcroll.errors import SandboxError
from hpcroll.sandboxes.attendant import wire

_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Reply:
    header: dict[str, Any]
    body: bytes
    fds: list[int]


class Channel:
    """Exchanges frames over a socket; watched by the loop all the time, so that a request costs no set-up.

    `SandboxError` where the other side has closed it.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._decoder = wire.Decoder()
        self._fds: list[int] = []
        self._waiter: asyncio.Future[Reply] | None = None
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    async def request(
        self, header: dict[str, Any], fds: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> Reply:
        """Sends `header` and returns the reply; where it raises, the channel is of no further use."""
        waiter = self.expect()
        await self.send(header, fds)
        return await self.reply(waiter, timeout_s)

    def expect(self) -> asyncio.Future[Reply]:
        """A future of the next frame that arrives."""
        if self.closed:
            raise self._gone()
        assert self._waiter is None or self._waiter.cancelled(), "one request at a time"
        self._waiter = self._loop.create_future()
        return self._waiter

    async def reply(self, waiter: asyncio.Future[Reply], timeout_s: float | None = None) -> Reply:
        """The reply that `waiter` stands for; `SandboxError` where it takes longer than `timeout_s`."""
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self._expire, timeout_s)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # It came in the same moment, and nobody will take its descriptors.
                for fd in waiter.result().fds:
                    os.close(fd)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def send(self, header: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.closed:
            raise self._gone()
        data = wire.encode(header)
        try:
            # Nearly always all of it: the socket's buffer is empty between two requests.
            sent = socket.send_fds(self._sock, [data], list(fds))
            if sent < len(data):
                await self._loop.sock_sendall(self._sock, memoryview(data)[sent:])
        except OSError as error:
            self.close()
            raise self._gone() from error

    def close(self) -> None:
        """Closes the socket; whoever waits for a reply gets `SandboxError`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fail(self._gone())

    def _readable(self) -> None:
        try:
            data, ancillary, _flags, _address = self._sock.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(wire.MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        self._fds += wire.descriptors(ancillary)
        if not data:
            self.close()
            return
        frame = self._decoder.feed(data)
        if frame is None:
            return
        fds, self._fds = self._fds, []
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            for fd in fds:
                os.close(fd)
        else:
            waiter.set_result(Reply(*frame, fds))

    def _expire(self, timeout_s: float) -> None:
        self._fail(SandboxError(f"sandbox {self._name} has not answered within {timeout_s:g} s"))
        self.close()

    def _fail(self, error: SandboxError) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # nobody may wait any more: a cancelled caller has other worries

    def _gone(self) -> SandboxError:
        return SandboxError(f"sandbox {self._name} is gone: its attendant closed the connection")
