"""No sandbox at all: commands run on the node as the user. For trusted payloads and for debugging."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from hpcroll.config import SandboxConfig, Strict
from hpcroll.errors import ConfigError, ImageError, IsolationUnavailableError
from hpcroll.sandboxes import places
from hpcroll.sandboxes.attendance import Attendance
from hpcroll.sandboxes.attended import AttendedSandbox
from hpcroll.sandboxes.base import Capabilities, SandboxSpec
from hpcroll.sandboxes.starts import Starts

_OPT_OUT = "i_know_that_nothing_is_isolated"
_PLACES = {"HOME": "home", "TMPDIR": "tmp"}


class HostOptions(Strict):
    """`sandbox.options` of the host sandbox."""

    i_know_that_nothing_is_isolated: bool = False
    """Payloads may read, write, kill and reach whatever the user may, this worker included."""


class HostProvider:
    """Runs commands in a fresh directory of the node's scratch, and isolates them from nothing."""

    Options: ClassVar[type[Strict]] = HostOptions

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._options = HostOptions.model_validate(config.options)
        self._starts = Starts(config)

    def check(self, image: str | None) -> None:
        """Raises unless the config opts out of isolation by name and asks for nothing that needs it."""
        self._permit()
        if (image or self._config.image) is not None:
            raise ImageError("the host sandbox has no images: leave sandbox.image and the task's image out")

    def probe(self) -> Capabilities:
        """What it can do: run commands."""
        reason = "the host sandbox isolates nothing"
        names = ("network_isolation", "pid_isolation", "writable_root", "memory_limit", "disk_limit")
        return Capabilities(
            available=self._options.i_know_that_nothing_is_isolated,
            network_isolation=False,
            pid_isolation=False,
            writable_root=None,
            memory_limit=False,
            disk_limit=False,
            fakeroot=False,
            model_socket=False,
            version=os.uname().release,
            reasons=dict.fromkeys((*names, "fakeroot", "model_socket"), reason),
        )

    def image_digest(self, image: str | None) -> str | None:
        """None: there is no image."""
        return None

    async def start(self, spec: SandboxSpec) -> AttendedSandbox:
        """A directory with an attendant; see `SandboxProvider.start`."""
        self.check(spec.image)
        if spec.binds or self._config.binds:
            raise ConfigError("the host sandbox binds nothing: leave sandbox.binds out")
        async with self._starts.slot(spec) as scratch:
            workdir = scratch / "work"
            for name in ("work", *_PLACES.values()):
                (scratch / name).mkdir()
            attendance = self._attendance(spec, workdir)
            return await AttendedSandbox.start(spec, scratch, attendance, starts=self._starts)

    def _attendance(self, spec: SandboxSpec, workdir: Path) -> Attendance:
        env = places.environment(self._config, spec)
        env |= {name: str(workdir.parent / directory) for name, directory in _PLACES.items()}
        return Attendance(
            container=None,
            container_env={},
            env={"PATH": os.environ.get("PATH", places.PATH)} | env,
            workdir=str(workdir),
            file_mb=self._config.file_mb,
            processes=None,  # the kernel would count the worker's own
            memory_mb=None,
            memory_disk=None,
            model_socket=False,
        )

    def _permit(self) -> None:
        if self._config.name != "host" or not self._options.i_know_that_nothing_is_isolated:
            raise IsolationUnavailableError(
                "the host sandbox isolates nothing and is refused: choose apptainer or bwrap, or set "
                f"sandbox.name: host and sandbox.options.{_OPT_OUT}: true"
            )
        for name in ("memory_mb", "disk_mb"):
            if getattr(self._config, name) is not None:
                raise IsolationUnavailableError(
                    f"the host sandbox cannot enforce sandbox.{name}: leave it out, or choose another sandbox"
                )
