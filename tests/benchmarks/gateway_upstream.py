"""The inference server of the gateway's benchmark: a process that streams prepared replies at a set pace.

It speaks just enough HTTP/1.1 for clients that keep connections and send bodies with a length, so that it
costs little beside what is measured. `POST /pace` sets the time to the first token and between tokens;
each token leaves at its own time after the request was read, however late the one before it was.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal

from tests.benchmarks.gateway_conversation import conversation, turn_of

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"
_DONE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Pace:
    """When tokens leave; shared by every connection."""

    first_s = 0.02
    token_s = 0.002


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, pace: Pace, replies: list[list[bytes]]) -> None:
        self._pace = pace
        self._replies = replies
        self._received = bytearray()
        self._needed = 0
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._needed:
            head_length = self._received.find(b"\r\n\r\n") + 4
            if head_length < 4:
                return
            self._needed = head_length + _body_length(bytes(self._received[:head_length]))
        if len(self._received) >= self._needed:
            request, self._received, self._needed = bytes(self._received), bytearray(), 0
            self._answer(*request.split(b"\r\n\r\n", 1))

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"POST /v1/chat/completions "):
            self._transport.write(_HEAD)
            self._schedule(self._replies[turn_of(body)], 0, asyncio.get_running_loop().time())
            return
        if head.startswith(b"POST /pace "):
            vars(self._pace).update(json.loads(body))
        self._transport.write(_DONE)

    def _schedule(self, events: list[bytes], place: int, started_s: float) -> None:
        at_s = started_s + self._pace.first_s + place * self._pace.token_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._send, events, place, started_s)

    def _send(self, events: list[bytes], place: int, started_s: float) -> None:
        assert self._transport is not None
        self._transport.write(events[place])
        if place + 1 < len(events):
            self._schedule(events, place + 1, started_s)


def _body_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return 0


def _replies() -> list[list[bytes]]:
    """The chunks of each turn's reply as they go over the wire."""
    replies = [[b"%x\r\n%b\r\n" % (len(event), event) for event in turn.events] for turn in conversation()]
    for reply in replies:
        reply[-1] += _END
    return replies


async def serve() -> None:
    """Prints the port it listens on and serves until SIGTERM."""
    pace, replies = Pace(), _replies()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(lambda: Connection(pace, replies), "127.0.0.1", 0, backlog=1024)
    gc.freeze()
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve())
