"""Sandboxes made with Apptainer: any SIF file or directory image, as an unprivileged user."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from hpcroll.config import SandboxConfig, Strict
from hpcroll.errors import IsolationUnavailableError, SandboxError
from hpcroll.sandboxes import images, places
from hpcroll.sandboxes.attendance import HOLDER, Attendance
from hpcroll.sandboxes.attended import AttendedSandbox
from hpcroll.sandboxes.base import Capabilities, SandboxSpec
from hpcroll.sandboxes.starts import Starts

_log = logging.getLogger(__name__)

_TRIES = 2


class RootWay(StrEnum):
    """How the root of a sandbox is made writable; the image itself never changes."""

    OVERLAY = "overlay"
    """Changes go to a directory on the node's scratch."""
    TMPFS = "tmpfs"
    """Changes go to memory; Apptainer's administrator sets how much (64 MiB by default)."""
    COPY = "copy"
    """Each sandbox has its own copy of a directory image on the node's scratch."""
    READ_ONLY = "read-only"
    """The root does not change; the writable places do."""


class ApptainerOptions(Strict):
    """`sandbox.options` of the apptainer sandbox."""

    writable_root: tuple[RootWay, ...] = Field(default=tuple(RootWay), min_length=1)
    """Ways to make the root writable, best first; the first that works on the node is taken."""
    fakeroot: bool = False
    """Run payloads as root inside (package managers); needs an entry in /etc/subuid."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest that a sandbox may take to start, in seconds."""


# What a root inside needs to install packages and drop to other users; none of it reaches outside.
_FAKEROOT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31)
_FILE_SERVERS = ("squashfuse_ll", "squashfuse", "fuse-overlayfs", "fuse2fs", "gocryptfs")
_BOUND_ETC = ("hosts", "nsswitch.conf")
"""Files of `/etc` that Apptainer does not make by itself."""
_UNLIMITED = (RootWay.OVERLAY, RootWay.COPY)
"""Ways whose size nothing limits, hence not with `disk_mb`."""


class ApptainerProvider:
    """Starts sandboxes with the `apptainer` on PATH, always in a user namespace."""

    Options: ClassVar[type[Strict]] = ApptainerOptions

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._options = ApptainerOptions.model_validate(config.options)
        self._starts = Starts(config)
        self._ways: dict[bool, RootWay] = {}
        """The way that works here, for directory images (True) and for SIF files (False)."""
        self._finding = asyncio.Lock()

    def check(self, image: str | None) -> None:
        """Raises `ImageError` where `image` is neither a SIF file nor a directory with a root file system."""
        places.check(self._config)
        images.locate(image or self._config.image)

    def probe(self) -> Capabilities:
        """What Apptainer can do on this node, shown by a sandbox of the default image where there is one."""
        reasons: dict[str, str] = {}
        way: RootWay | None = None
        version = ""
        try:
            version = apptainer_version()
            if self._config.image is None:
                reasons["writable_root"] = "not tried: there is no default image (sandbox.image)"
            else:
                # In a thread of its own: the caller's may have a running loop.
                with ThreadPoolExecutor(1) as pool:
                    way = pool.submit(asyncio.run, self._probe_root()).result()
        except (SandboxError, subprocess.SubprocessError) as error:
            reasons["available"] = str(error)
        available = "available" not in reasons
        if way is RootWay.READ_ONLY:
            reasons["writable_root"] = "no way of sandbox.options.writable_root works on this node"
        if places.uncounted_reason() is not None:
            reasons["processes"] = f"not limited: {places.uncounted_reason()}"
        return Capabilities(
            available=available,
            network_isolation=available,
            pid_isolation=available,
            writable_root=None if way in (None, RootWay.READ_ONLY) else str(way),
            memory_limit=available,
            disk_limit=available,
            fakeroot=available and self._options.fakeroot,
            model_socket=available and not self._config.network,
            version=version,
            reasons=reasons,
        )

    def image_digest(self, image: str | None) -> str | None:
        """SHA-256 of a SIF file; a directory image has no name for its content."""
        path = images.locate(image or self._config.image)
        return images.digest(path) if path.is_file() else None

    async def start(self, spec: SandboxSpec) -> AttendedSandbox:
        """A started sandbox; see `SandboxProvider.start`."""
        image = images.locate(spec.image or self._config.image)
        return await self._start(image, spec, await self._way(image))

    async def _way(self, image: Path) -> RootWay:
        """The first configured way that works on this node; found once, by starting sandboxes."""
        is_directory = image.is_dir()
        async with self._finding:
            if is_directory not in self._ways:
                self._ways[is_directory] = await self._find_way(image)
            return self._ways[is_directory]

    async def _find_way(self, image: Path) -> RootWay:
        refused: list[str] = []
        for way in self._options.writable_root:
            reason = self._refusal(way, image)
            for _ in range(_TRIES if reason is None else 0):
                # More than once: a start that fails by chance must not cost the worker its better way.
                reason = await self._try_way(way, image)
                if reason is None:
                    if refused:
                        _log.warning("image=%s writable_root=%s refused=%s", image, way, "; ".join(refused))
                    return way
            refused.append(f"{way}: {reason}")
        raise SandboxError(f"image {image} does not start on this node: {'; '.join(refused)}")

    def _refusal(self, way: RootWay, image: Path) -> str | None:
        if way is RootWay.COPY and not image.is_dir():
            return "only a directory image can be copied"
        if way in _UNLIMITED and self._config.disk_mb is not None:
            return "sandbox.disk_mb could not limit it"
        return None

    async def _try_way(self, way: RootWay, image: Path) -> str | None:
        """Why `way` does not work here; None where it does."""
        try:
            sandbox = await self._start(image, SandboxSpec(name=f"probe-{way}", image=str(image)), way)
        except IsolationUnavailableError:
            raise
        except SandboxError as error:
            return str(error)
        try:
            if way is not RootWay.READ_ONLY:
                await sandbox.put(b"", "/.hpcroll-probe")
        except SandboxError as error:
            return str(error)
        finally:
            await sandbox.stop()
        return None

    async def _probe_root(self) -> RootWay:
        return await self._way(images.locate(self._config.image))

    async def _start(self, image: Path, spec: SandboxSpec, way: RootWay) -> AttendedSandbox:
        async with self._starts.slot(spec) as scratch:
            if way is RootWay.COPY:
                image = await asyncio.to_thread(_copy, image, scratch)
            attendance = Attendance(
                container=(find_apptainer(), *self._arguments(spec, scratch, way), str(image), *HOLDER),
                container_env=_runtime_environment(scratch),
                env=places.environment(self._config, spec),
                workdir=places.WORKDIR,
                file_mb=self._config.file_mb,
                processes=places.process_limit(self._config),
                memory_mb=self._config.memory_mb,
                memory_disk=places.memory_disk(self._config),
                capabilities=_FAKEROOT_CAPABILITIES if self._options.fakeroot else (),
                model_socket=not self._config.network,
                start_timeout_s=self._options.start_timeout_s,
            )
            return await AttendedSandbox.start(spec, scratch, attendance, starts=self._starts)

    def _arguments(self, spec: SandboxSpec, scratch: Path, way: RootWay) -> Iterator[str]:
        # --userns always: a set-uid Apptainer makes no user namespace, and its others could not be entered.
        yield from ("--quiet", "exec", "--userns", "--containall", "--cleanenv", "--no-home", "--pwd", "/")
        # Not the site's own bind paths, and no /sys: where systemd delegates cgroups to users, a payload
        # could kill the worker through it.
        yield from ("--no-mount", "sys,hostfs,bind-paths")
        if not self._config.network:
            yield from ("--net", "--network", "none")
        if self._options.fakeroot:
            yield "--fakeroot"
        if way is RootWay.OVERLAY:
            overlay = scratch / "root"
            overlay.mkdir()
            yield from ("--overlay", str(overlay))
        elif way is RootWay.TMPFS:
            yield "--writable-tmpfs"
        elif way is RootWay.COPY:
            yield "--writable"
        for path in places.etc_files(scratch):
            if path.name in _BOUND_ETC:
                yield from ("--bind", _bind(path, f"/etc/{path.name}", "ro"))
        for source, target in places.make(scratch):
            yield from ("--bind", _bind(source, target, "rw"))
        for source, target in places.binds(self._config, spec):
            yield from ("--bind", _bind(source, target, "ro"))


def find_apptainer() -> str:
    """The path of `apptainer`; raises `IsolationUnavailableError` where there is none."""
    found = shutil.which("apptainer")
    if found is None:
        raise IsolationUnavailableError(
            "no apptainer on PATH: load its module in launch.setup, or choose sandbox.name: bwrap"
        )
    return found


def apptainer_version() -> str:
    """Such as `1.4.5`."""
    done = subprocess.run(
        [find_apptainer(), "--version"], capture_output=True, timeout=60, text=True, check=True
    )
    return done.stdout.strip().rpartition(" ")[2]


def _bind(source: Path, target: str, mode: str) -> str:
    # Apptainer splits its argument at commas and colons, and offers no way to quote them.
    if any(mark in f"{source}{target}" for mark in ",:"):
        raise SandboxError(f"bind {source} to {target}: apptainer cannot bind paths that hold , or :")
    return f"{source}:{target}:{mode}"


def _runtime_environment(scratch: Path) -> dict[str, str]:
    """Environment of the runtime itself: its caches and settings stay on the node, out of a shared home."""
    private = scratch / "apptainer"
    private.mkdir()
    path = os.environ.get("PATH", places.PATH)
    return {
        "PATH": f"{_shield_servers(private / 'bin')}:{path}",
        "HOME": str(private),
        "APPTAINER_CONFIGDIR": str(private),
        "APPTAINER_CACHEDIR": str(private),
        "APPTAINER_TMPDIR": str(private),
    }


def _shield_servers(directory: Path) -> Path:
    """Scripts that start the servers of FUSE file systems, deaf to signals that mean the worker.

    Slurm may send those to every process of a step; without its server the root of a sandbox is gone.
    """
    directory.mkdir()
    for name in _FILE_SERVERS:
        program = shutil.which(name)
        if program is not None:
            script = directory / name
            script.write_text(
                f"#!/bin/sh\ntrap '' HUP INT TERM USR1 USR2\nexec {shlex.quote(program)} \"$@\"\n"
            )
            script.chmod(0o755)
    return directory


def _copy(image: Path, scratch: Path) -> Path:
    copy = scratch / "copy"
    shutil.copytree(image, copy, symlinks=True)
    # With --writable Apptainer makes no mount points of its own.
    for inside in places.WRITABLE.values():
        (copy / inside.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in _BOUND_ETC:
        (copy / "etc" / name).touch()
    return copy
