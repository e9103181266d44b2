"""The cursor file of a named follower: how far it has come, and that it lives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcroll.fs.atomic import make_directories, read_fresh, replace
from hpcroll.fs.paths import RunPaths

_EVERY_S = 5.0
"""Seconds between two beats, at least."""


class Presence:
    """Rank 0 of a named follower beats, its other ranks and retention watch the file's content change."""

    def __init__(self, paths: RunPaths, trainer: str, *, hold_s: float) -> None:
        """`hold_s`: how long retention keeps what this follower has not read, once it stands still."""
        self._paths = paths
        self._path = paths.reader_cursor(trainer)
        self._hold_s = hold_s
        self._beats = time.time_ns()  # a number that the follower before a restart did not write
        self._due_at = 0.0
        self._written: tuple[Any, Any] | None = None

    def beat(self, position: Callable[[], Mapping[str, Any]]) -> None:
        """Writes where the follower stands, unless it has just done so."""
        if time.monotonic() >= self._due_at:
            self._write(position())

    def rest(self, position: Callable[[], Mapping[str, Any]]) -> None:
        """Writes where the follower stands now that its stream has ended: nothing before that is held."""
        where = position()
        if (where["shards"], where["pack"]) != self._written:
            self._write(where)

    def _write(self, where: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if not self._path.parent.is_dir():
            make_directories([self._path.parent])
        self._beats += 1
        content = {
            "shards": where["shards"],
            "pack": where["pack"],
            "expires_s": self._hold_s,
            "beat": self._beats,
        }
        replace(self._path, json.dumps(content, separators=(",", ":")).encode())
        self._due_at = now + _EVERY_S
        self._written = (where["shards"], where["pack"])

    def sign(self) -> bytes | None:
        """What the follower wrote last, as another rank sees it."""
        return read_fresh(self._path)
