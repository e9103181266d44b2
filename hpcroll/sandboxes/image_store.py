"""Makes images: pulled or built through spython, checked, and only then visible under their name."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcroll.errors import ImageError
from hpcroll.fs import fsync_directory
from hpcroll.fs.locks import node_lock
from hpcroll.sandboxes import images
from hpcroll.sandboxes.apptainer import find_apptainer
from hpcroll.sandboxes.scratch import cache_directory

SCHEMES = ("docker", "oras", "library", "shub", "https")
"""What spython pulls from."""
_TRIAL_S = 300.0
_WORDS_BYTES = 2000


def pull(uri: str, dest: Path, *, scratch: Path = Path("/tmp"), timeout_s: float = 3600.0) -> str:
    """Pulls the image at `uri` into SIF file `dest`; returns its SHA-256 (hex).

    `dest` appears whole, tried and durable, or not at all; an image that is there is replaced. One pull at
    a time for each node and user: Apptainer's cache, which lies on `scratch`, races otherwise. Raises
    `ImageError` with Apptainer's own words.
    """
    scheme = uri.partition("://")[0]
    if scheme not in SCHEMES or "://" not in uri:
        raise ImageError(f"image URI {uri!r} must begin with one of {', '.join(f'{s}://' for s in SCHEMES)}")

    def fetch(part: Path) -> str:
        arguments = {"image": uri, "name": part.name, "pull_folder": str(part.parent), "force": True}
        return _call("pull", arguments, what=f"image {uri}", scratch=scratch, timeout_s=timeout_s)[1]

    return _make(dest, fetch, scratch=scratch, timeout_s=timeout_s)


def build(
    source: str,
    dest: Path,
    *,
    options: tuple[str, ...] = (),
    scratch: Path = Path("/tmp"),
    timeout_s: float = 3600.0,
) -> str:
    """Builds SIF file `dest` from a definition file, a directory or another image, without root.

    `options` go to `apptainer build` as they are (`--fakeroot`, `--build-arg` ...). Returns and raises
    like `pull`.
    """
    if "://" not in source and not Path(source).exists():
        raise ImageError(f"build source {source} does not exist: give a definition file, directory or image")

    def fetch(part: Path) -> str:
        arguments = {
            "recipe": source,
            "image": str(part),
            "options": list(options),
            "sudo": False,
            "return_result": True,
        }
        what = f"image from {source}"
        return _call("build", arguments, what=what, scratch=scratch, timeout_s=timeout_s)[1]

    return _make(dest, fetch, scratch=scratch, timeout_s=timeout_s)


def inspect(image: Path, *, scratch: Path = Path("/tmp"), timeout_s: float = 120.0) -> dict[str, Any]:
    """Labels, environment, definition and scripts of `image`, as Apptainer tells them."""
    images.locate(str(image))
    arguments = {"image": str(image)}
    answer, words = _call("inspect", arguments, what=str(image), scratch=scratch, timeout_s=timeout_s)
    attributes = answer.get("attributes") if isinstance(answer, dict) else None
    if not isinstance(attributes, dict):
        raise ImageError(f"image {image} cannot be inspected: {words or answer}")
    return attributes


def version(*, scratch: Path = Path("/tmp"), timeout_s: float = 60.0) -> str:
    """The runtime's own version line, as spython sees it."""
    answer, _words = _call("version", {}, what="the runtime", scratch=scratch, timeout_s=timeout_s)
    return str(answer).strip()


def _make(dest: Path, fetch: Callable[[Path], str], *, scratch: Path, timeout_s: float) -> str:
    if dest.is_dir():
        raise ImageError(f"{dest} is a directory: give the path of the SIF file to make")
    if not dest.parent.is_dir():
        raise ImageError(f"{dest.parent} does not exist: make it first, or choose another destination")
    # Beside its destination: a rename cannot cross file systems.
    part = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.sif")
    try:
        with _cache_turn(scratch, timeout_s):
            words = fetch(part)
        if not part.exists():
            # spython returns the name of the image whether there is one or not.
            raise ImageError(f"image {dest} was not made: {words or 'apptainer gave no reason'}")
        images.locate(str(part))
        _try_out(part)
        digest = images.digest(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(dest)
        fsync_directory(dest.parent)
    finally:
        part.unlink(missing_ok=True)
    return digest


@contextmanager
def _cache_turn(scratch: Path, timeout_s: float) -> Iterator[None]:
    try:
        with node_lock(cache_directory(scratch) / "lock", timeout_s=timeout_s):
            yield
    except TimeoutError as error:
        raise ImageError(f"another pull or build on this node is still running: {error}") from error


def _try_out(image: Path) -> None:
    """Starts `image` once, as sandboxes do."""
    flags = ("--quiet", "exec", "--userns", "--containall", "--no-home", "--no-mount", "hostfs,bind-paths")
    argv = [find_apptainer(), *flags, "--pwd", "/", str(image), "sh", "-c", "cat < /dev/null"]
    try:
        _run(argv, dict(os.environ), _TRIAL_S)
    except ImageError as error:
        raise ImageError(f"image {image.name} does not start: {error}") from error


def _call(
    method: str, arguments: dict[str, Any], *, what: str, scratch: Path, timeout_s: float
) -> tuple[Any, str]:
    """What spython's `method` returns, and the end of its output; `ImageError` where it fails and says so."""
    runtime = find_apptainer()
    with tempfile.TemporaryDirectory(prefix="hpcroll-spython-") as folder:
        # spython runs a program of this name, whatever is installed.
        (Path(folder) / "singularity").symlink_to(runtime)
        result = Path(folder) / "result.json"
        request = json.dumps({"method": method, "arguments": arguments})
        argv = [sys.executable, "-m", "hpcroll.sandboxes.spython_call", request, str(result)]
        env = os.environ | {
            "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
            "APPTAINER_CACHEDIR": str(cache_directory(scratch)),
        }
        try:
            words = _run(argv, env, timeout_s)
        except ImageError as error:
            raise ImageError(f"{what}: {error}") from error
        if not result.exists():
            raise ImageError(f"{what}: {words or 'spython ended without an answer'}")
        answer = json.loads(result.read_text(encoding="utf-8"))
        if isinstance(answer, dict) and answer.get("return_code"):
            raise ImageError(f"{what}: {str(answer.get('message'))[-_WORDS_BYTES:]}")
        return answer, words


def _run(argv: list[str], env: dict[str, str], timeout_s: float) -> str:
    """The end of what `argv` wrote; raises `ImageError` with it where it fails or takes too long."""
    with tempfile.TemporaryFile() as log:
        # A file takes what a pipe would block on, and a session of its own can be killed as a whole.
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        ) as process:
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        size_bytes = log.seek(0, os.SEEK_END)
        log.seek(max(0, size_bytes - _WORDS_BYTES))
        words = log.read().decode(errors="replace").strip()
    if code is None:
        raise ImageError(f"not done after {timeout_s:g} s: {words}")
    if code != 0:
        raise ImageError(words or f"{argv[0]} exited with {code}")
    return words
