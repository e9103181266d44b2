"""Inference servers: who announced itself, and whose heartbeat still moves."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from hpcroll.config import EngineKind
from hpcroll.contract import Record
from hpcroll.errors import ConfigError, CorruptRecordError
from hpcroll.fs.atomic import list_names, publish, read_fresh
from hpcroll.fs.paths import RunPaths

_BEAT_DIGITS = 20
KINDS = tuple(kind.value for kind in EngineKind)
"""Engines whose API a gateway can speak."""
DEFAULT_KIND = EngineKind.VLLM.value


class Endpoint(Record):
    """An inference server, as it announced itself."""

    SCHEMA: ClassVar[str] = "1.0"

    endpoint_id: str
    url: str
    """Base URL, with or without `/v1`."""
    served_name: str
    """Model name that the server expects."""
    version: int | None = Field(default=None, ge=0)
    """The policy version that it serves; None where it follows the registry."""
    kind: str = DEFAULT_KIND
    """The engine whose API it speaks, one of `KINDS`."""
    node: str = ""

    @classmethod
    def new(cls, url: str, served_name: str, *, version: int | None, kind: str) -> Self:
        """An endpoint with an id of its own.

        Raises `ConfigError` where `url` is no HTTP URL or `kind` is unknown.
        """
        if kind not in KINDS:
            raise ConfigError(f"endpoint kind {kind!r} is unknown; known: {', '.join(KINDS)}")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"endpoint {url!r} is not an http:// or https:// URL")
        try:
            return cls(
                endpoint_id=secrets.token_hex(8),
                url=url,
                served_name=served_name,
                version=version,
                kind=kind,
                node=socket.gethostname(),
            )
        except ValidationError as error:
            raise ConfigError(f"endpoint {url!r} cannot be registered: {error}") from error


class EndpointLease:
    """The right to be called: `beat` it more often than gateways' patience, `withdraw` it at the end."""

    def __init__(self, paths: RunPaths, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._paths = paths
        self._count = 0

    def beat(self) -> None:
        """Moves the heartbeat; visible to readers that open the file after the return."""
        self._count += 1
        beat = self._paths.endpoint_beat(self.endpoint.endpoint_id)
        # Opened and closed each time: closing is what makes a network file system send the bytes.
        descriptor = os.open(beat, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, f"{self._count:0{_BEAT_DIGITS}d}".encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def withdraw(self) -> None:
        """Takes the server out of every gateway's list; safe to call again."""
        self._paths.endpoint_file(self.endpoint.endpoint_id).unlink(missing_ok=True)
        self._paths.endpoint_beat(self.endpoint.endpoint_id).unlink(missing_ok=True)


def register(paths: RunPaths, endpoint: Endpoint) -> EndpointLease:
    """Announces `endpoint`, with a first beat; visible on return."""
    lease = EndpointLease(paths, endpoint)
    lease.beat()  # first: an announced server without a beat file would look withdrawn
    publish(paths.endpoint_file(endpoint.endpoint_id), endpoint.to_json().encode())
    return lease


class EndpointWatch:
    """Observes heartbeats with this process's own monotonic clock; no two nodes' clocks are compared."""

    def __init__(self, paths: RunPaths, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._known: dict[str, Endpoint] = {}
        self._moved: dict[str, tuple[bytes, float]] = {}

    def live(self, max_silence_s: float) -> tuple[Endpoint, ...]:
        """The servers whose beat was seen to move within the last `max_silence_s` seconds, by id.

        One that is seen for the first time counts as moved just now: nobody can tell how old its beat is.
        """
        now = self._clock()
        live = []
        for endpoint_id in self._announced():
            beat = read_fresh(self._paths.endpoint_beat(endpoint_id))
            if beat is None:
                continue  # withdrawn; the listing may be tens of seconds old
            seen, moved_at = self._moved.get(endpoint_id, (b"", now))
            if beat != seen:
                moved_at = now
            self._moved[endpoint_id] = (beat, moved_at)
            if now - moved_at <= max_silence_s:
                live.append(self._known[endpoint_id])
        return tuple(live)

    def _announced(self) -> list[str]:
        directory = self._paths.endpoint_file("any").parent
        listed = sorted(name[:-5] for name in list_names(directory) if name.endswith(".json"))
        for gone in self._known.keys() - set(listed):
            del self._known[gone]
            self._moved.pop(gone, None)
        return [endpoint_id for endpoint_id in listed if self._is_known(endpoint_id)]

    def _is_known(self, endpoint_id: str) -> bool:
        if endpoint_id not in self._known:
            path = self._paths.endpoint_file(endpoint_id)
            data = read_fresh(path)
            if data is None:
                return False
            try:
                self._known[endpoint_id] = Endpoint.from_json(data)
            except ValidationError as error:
                raise CorruptRecordError(f"{path} is not an endpoint: {error}") from error
        return True
