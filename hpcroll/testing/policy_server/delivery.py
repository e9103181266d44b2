"""Sends a reply, tells the log how far it got, and breaks it where a fault says so."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from hpcroll.testing.policy_server.faults import Fault, FaultKind
from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.record import CLIENT_GONE, DONE, FAULT, Entry
from hpcroll.testing.policy_server.wire import Event, Wire

_BREAKS = frozenset({FaultKind.RESET, FaultKind.TRUNCATED})
_PAGE = "<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\n"


@dataclass(slots=True)
class Delivery:
    """One reply's way to its client."""

    request: web.Request
    wire: Wire
    out: Outgoing
    entry: Entry
    token_latency_s: float
    set_version: Callable[[int], None]
    version: Callable[[], int]
    split_characters: bool
    """Whether an event's first character beyond ASCII lies across two chunks of the connection."""
    sent: int = 0
    _struck: bool = False

    async def run(self, *, stream: bool) -> web.StreamResponse:
        """The response; however it ends, the log's entry is ended."""
        try:
            return await (self._stream() if stream else self._whole())
        finally:
            # Cancelled, or the connection broke in a write; else this changes nothing.
            self._end(CLIENT_GONE)

    async def _whole(self) -> web.StreamResponse:
        headers = self.out.headers()
        length = len(self.out.reply.ids)
        await asyncio.sleep(self.token_latency_s * length)
        fault = self.out.fault
        if fault is not None and await self._strike(fault):
            return self._broken(web.Response())
        text = json.dumps(self.wire.whole(self.out), ensure_ascii=False)
        if fault is not None and fault.kind is FaultKind.TRUNCATED:
            self._end(FAULT)
            text = text[: len(text) // 2]
        self.sent = length
        self._end(DONE)
        return web.Response(text=text, content_type="application/json", headers=headers)

    async def _stream(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.out.headers()})
        await response.prepare(self.request)
        fault = self.out.fault
        for event in self.wire.events(self.out):
            await asyncio.sleep(self.token_latency_s * (event.sent - self.sent))
            if fault is not None and not self._struck and (event.sent > fault.after_tokens or event.ends):
                self._struck = True
                if await self._strike(fault):
                    return self._broken(response)
                if fault.kind is FaultKind.TRUNCATED:
                    data = _event_bytes(event)
                    await response.write(data[: len(data) // 2])
                    self._end(FAULT)
                    return response
            if event.ends:
                self.sent = event.sent
                self._end(DONE)
            for data in self._chunks(_event_bytes(event)):
                await response.write(data)
            self.sent = event.sent
        return response

    def _chunks(self, data: bytes) -> list[bytes]:
        first = next((place for place, byte in enumerate(data) if byte > 0x7F), None)
        if first is None or not self.split_characters:
            return [data]
        return [data[: first + 1], data[first + 1 :]]

    async def _strike(self, fault: Fault) -> bool:
        """True where the connection is to be reset now."""
        if fault.kind is FaultKind.STALL:
            await asyncio.sleep(fault.stall_s)
        elif fault.kind is FaultKind.VERSION:
            self.set_version(self.version() + 1 if fault.version is None else fault.version)
        return fault.kind is FaultKind.RESET

    def _broken(self, response: web.StreamResponse) -> web.StreamResponse:
        self._end(FAULT)
        reset(self.request)
        return response

    def _end(self, ended: str) -> None:
        self.entry.end(ended, sent=self.sent, version=self.version())


def instead_of_reply(fault: Fault) -> web.Response:
    """The response of a fault that makes no reply."""
    if fault.kind is FaultKind.GARBAGE:
        return web.Response(body=b"\x00\xff\xfe{\x80" * 64, content_type="application/json")
    if fault.kind is FaultKind.HTML:
        return web.Response(text=_PAGE, content_type="text/html")
    headers = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s:g}"}
    error = {"message": "scripted fault", "type": "ScriptedFault", "param": None, "code": fault.status}
    return web.json_response({"error": error}, status=fault.status, headers=headers)


def reset(request: web.Request) -> None:
    """Resets the connection of `request`, as the death of a server's machine does."""
    transport = request.transport
    if transport is None:
        return
    if (connection := transport.get_extra_info("socket")) is not None:
        # Without lingering, closing sends RST: the client sees an error and not an end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _event_bytes(event: Event) -> bytes:
    data = b"[DONE]" if event.data is None else json.dumps(event.data, ensure_ascii=False).encode()
    return b"data: " + data + b"\n\n"
