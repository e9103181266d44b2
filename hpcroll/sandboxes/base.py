"""What a sandbox is: the protocol that every provider implements, and the values it speaks in."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from hpcroll.config import SandboxConfig, Strict


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider can do on this node, as probed; each False has its reason in `reasons`."""

    available: bool
    network_isolation: bool
    pid_isolation: bool
    writable_root: str | None
    """The way in which the root is made writable, or None where it is read-only."""
    memory_limit: bool
    disk_limit: bool
    fakeroot: bool
    model_socket: bool
    """A listening socket can be handed out of the sandbox's network namespace."""
    version: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is started with."""

    name: str
    """Names it on this node: rollout, attempt and purpose; also its scratch directory."""
    image: str | None
    """None: the config's default image."""
    binds: tuple[tuple[Path, str], ...] = ()
    """Further read-only binds: host path, path inside."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The outcome of one command.

    `exit_code` is the command's own, negative for a signal, None where it was killed on its time-out.
    Streams are raw bytes, cut to the cap with the beginning and the end kept; `*_bytes` count all.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    duration_s: float
    timed_out: bool = False

    @property
    def truncated(self) -> bool:
        return self.stdout_bytes > len(self.stdout) or self.stderr_bytes > len(self.stderr)


class Sandbox(Protocol):
    """A running sandbox. Every method raises `SandboxError` where the sandbox itself is gone."""

    spec: SandboxSpec
    workdir: str
    """Absolute path inside, writable, where commands start."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Runs `argv` through the sandbox's persistent shell; its whole process tree is dead on return.

        A command that times out is killed and reported; the sandbox stays usable. Cancelling the
        awaiting task kills the command too.
        """
        ...

    async def put(self, data: bytes, path: str, *, mode: int = 0o644) -> None:
        """Writes a file inside, its parent directories made as needed."""
        ...

    async def put_tree(self, archive: Path, path: str) -> None:
        """Unpacks a tar archive (plain, .gz or .zst) of the host below directory `path` inside."""
        ...

    async def get(self, path: str, *, limit_bytes: int = 16 << 20) -> bytes:
        """The content of a file inside; raises `FileNotFoundError`, or `SandboxError` past the limit."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """A listening TCP socket on 127.0.0.1:`port` inside, accepted on by the caller outside.

        Raises `IsolationUnavailableError` where the provider cannot hand one out.
        """
        ...

    async def alive(self) -> bool:
        """Whether the sandbox still answers: decides sandbox fault or payload fault."""
        ...

    async def stop(self) -> None:
        """Kills everything inside and removes its scratch; idempotent, never raises for a dead sandbox."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes of one kind on this node. Constructed from the config, without I/O."""

    Options: ClassVar[type[Strict]]
    """Model of `sandbox.options`."""

    def __init__(self, config: SandboxConfig) -> None: ...

    def check(self, image: str | None) -> None:
        """Raises `ImageError` or `ConfigError` for what can be told wrong before anything is submitted."""
        ...

    def probe(self) -> Capabilities:
        """What this node can do; slow (starts a sandbox), so call it once per worker."""
        ...

    def image_digest(self, image: str | None) -> str | None:
        """SHA-256 (hex) that names the image's content, None where the image has no such name."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A started sandbox, or `SandboxError`, `ImageError`, `IsolationUnavailableError`.

        Whatever was half started is gone when it raises or is cancelled.
        """
        ...
