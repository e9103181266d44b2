"""Makes a tree independent of the image: its programs load their own C library, in images without any too.

A program names its loader by an absolute path, which is overwritten in place: packed programs (`bun`,
`pkg`) carry data behind their code that a rewritten file would lose. The loader gets the tree's `lib`
in the place of the system's directories, so that neither variables nor wrappers are needed, and whatever
the agent starts from the image uses the image's own libraries.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

_LIB = b"/opt/hpcroll/lib"
_LOADER = b"/opt/hpcroll/lib/ld.so"
_LOADERS = (b"/lib64/ld-linux-x86-64.so.2", b"/lib/ld-linux-aarch64.so.1")
_HEADER_BYTES = 4096
"""The loader's name stands near the beginning of a file, as linkers lay it out."""
_ELF = b"\x7fELF"
_DYNAMIC = (2, 3)
"""ELF types of programs and libraries."""
_FOUND = re.compile(r"=> (/\S+) \(0x")
_LDD_S = 60.0


def make_independent(tree: Path) -> bool:
    """Gives `tree` the libraries that its files load, and its programs the loader that finds them there.

    False, with nothing changed, where this machine's loader cannot be told another directory (its own
    are too short, as outside of Debian and Ubuntu): then the programs need the image's C library.
    """
    programs = []
    libraries: dict[str, Path] = {}
    for path in _elf_files(tree):
        loader = _loader_of(path)
        if loader is not None:
            programs.append((path, loader))
        for library in _loads(path):
            if not library.is_relative_to(tree):
                libraries.setdefault(library.name, library)
    if not programs:
        return True
    [loader] = {loader for _, loader in programs}
    private = _private_loader(Path(loader.decode()))
    if private is None:
        return False
    target = tree / "lib"
    target.mkdir(exist_ok=True)
    for name, library in libraries.items():
        shutil.copy(library, target / name)
    (target / "ld.so").write_bytes(private)
    (target / "ld.so").chmod(0o755)
    # Programs may also load it by its own name, as a library.
    (target / Path(loader.decode()).name).unlink(missing_ok=True)
    (target / Path(loader.decode()).name).symlink_to("ld.so")
    for path, loader in programs:
        _set_loader(path, loader)
    return True


def _elf_files(tree: Path) -> Iterator[Path]:
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(20)
        if head[:4] == _ELF and struct.unpack_from("<H", head, 16)[0] in _DYNAMIC:
            yield path


def _loader_of(path: Path) -> bytes | None:
    """The loader that a program names; None for a library, and for a program without one."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    return next((loader for loader in _LOADERS if loader + b"\0" in head), None)


def _loads(path: Path) -> list[Path]:
    """The libraries that `path` loads here; those that this machine lacks are left out."""
    done = subprocess.run(
        ["ldd", str(path)], capture_output=True, text=True, errors="replace", timeout=_LDD_S, check=False
    )
    return [Path(found) for found in _FOUND.findall(done.stdout)]


def _private_loader(loader: Path) -> bytes | None:
    """The machine's loader with the tree's `lib` for its system directories, and without a cache."""
    data = loader.resolve().read_bytes()
    machine = {b"ld-linux-x86-64.so.2": b"x86_64", b"ld-linux-aarch64.so.1": b"aarch64"}
    name = machine[loader.name.encode()]
    directories = [b"/usr/lib/%s-linux-gnu/\0" % name, b"/lib/%s-linux-gnu/\0" % name]
    if directories[0] not in data:
        return None
    for directory in directories:
        data = data.replace(directory, _LIB.ljust(len(directory) - 1, b"/") + b"\0")
    for file in (b"/etc/ld.so.cache\0", b"/etc/ld.so.preload\0"):
        data = data.replace(file, b"/opt/hpcroll/-".ljust(len(file), b"\0"))
    return data


def _set_loader(path: Path, loader: bytes) -> None:
    mode = path.stat().st_mode
    path.chmod(mode | 0o200)
    with path.open("r+b") as file:
        position = file.read(_HEADER_BYTES).index(loader + b"\0")
        file.seek(position)
        file.write(_LOADER.ljust(len(loader), b"\0"))
    path.chmod(mode)
