"""What a provider tells the attendant of a sandbox that is to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOLDER = ("sh", "-c", "trap '' HUP INT TERM USR1 USR2; exec cat")
"""The only program that the container itself runs: its end is the end of the sandbox, and no signal that
is sent to a whole job step, or that the runtime passes on, may bring it about."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """What an attendant is told."""

    container: tuple[str, ...] | None
    """Command line that starts the container with `HOLDER` as its only program; None: no container."""
    container_env: Mapping[str, str]
    env: Mapping[str, str]
    """Environment of every command, over the image's own."""
    workdir: str
    file_mb: int
    processes: int | None
    memory_mb: int | None
    memory_disk: Mapping[str, Any] | None
    """`size_mb` and `places`: the writable places on one tmpfs."""
    capabilities: tuple[int, ...] = ()
    """Capabilities that payloads keep inside their user namespace (fakeroot)."""
    model_socket: bool = True
    """The sandbox has a network of its own, in which a port can be listened on."""
    start_timeout_s: float = 120.0
