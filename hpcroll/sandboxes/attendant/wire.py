"""Frames between the worker, the attendant and its lanes: a JSON header, a body of bytes, descriptors."""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

PREFIX = struct.Struct("!IQ")
"""Bytes of the header, bytes of the body."""
MAX_FDS = 8


def encode(header: dict[str, Any], body: bytes | bytearray = b"") -> bytes:
    """One frame as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((PREFIX.pack(len(text), len(body)), text, body))


class Decoder:
    """Collects received bytes until a frame is whole."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> tuple[dict[str, Any], bytes] | None:
        """The frame that `data` completes, or None while bytes are missing.

        One frame at a time is in flight on a socket: every request waits for its reply.
        """
        self._data += data
        if len(self._data) < PREFIX.size:
            return None
        header_bytes, body_bytes = PREFIX.unpack_from(self._data)
        total = PREFIX.size + header_bytes + body_bytes
        if len(self._data) < total:
            return None
        start = PREFIX.size + header_bytes
        header = json.loads(self._data[PREFIX.size : start])
        body = bytes(memoryview(self._data)[start:total])
        del self._data[:total]
        return header, body


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes, list[int]] | None:
    """The next frame and its descriptors from a blocking socket; None where the peer closed it."""
    decoder, fds = Decoder(), []
    while True:
        data, ancillary, _flags, _address = sock.recvmsg(
            1 << 16, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
        )
        fds += descriptors(ancillary)
        if not data:
            return None
        frame = decoder.feed(data)
        if frame is not None:
            return (*frame, fds)


def send(
    sock: socket.socket, header: dict[str, Any], body: bytes | bytearray = b"", fds: Sequence[int] = ()
) -> None:
    """Sends one frame over a blocking socket, its descriptors with the first byte."""
    data = encode(header, body)
    sent = socket.send_fds(sock, [data], list(fds)) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])


def descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in `recvmsg`'s ancillary data; they belong to the caller now."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
