"""A file system that lacks what claims rest on is refused, with the reason and a way out."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcroll.errors import UnsafeFilesystemError
from hpcroll.fs import probe_filesystem


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_local_file_system_passes_and_nothing_is_left(tmp_path: Path) -> None:
    found = probe_filesystem(tmp_path)
    assert found.claims == "link"
    assert found.symlinks
    assert found.free_bytes > 0
    assert found.filesystem != "unknown"
    assert names(tmp_path) == []
    assert type(found).from_json(found.to_json()) == found


def refuse_link(source: Path, name: Path) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def replace_name(source: Path, name: Path) -> None:
    shutil.copyfile(source, name)


def replace_name_and_deny_it(source: Path, name: Path) -> None:
    present = name.exists()
    shutil.copyfile(source, name)
    if present:
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def copy_nothing(source: Path, name: Path) -> None:
    name.touch(exist_ok=False)


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (refuse_link, "makes no hard links"),
        (replace_name, "replaces a name that exists"),
        (replace_name_and_deny_it, "replaced the name all the same"),
        (copy_nothing, "does not read as the file"),
    ],
)
def test_unsafe_links_are_refused(tmp_path: Path, link: object, reason: str) -> None:
    with pytest.raises(UnsafeFilesystemError, match=reason) as caught:
        probe_filesystem(tmp_path, link=link)  # type: ignore[arg-type]
    assert str(tmp_path) in str(caught.value)
    assert "another file system" in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: needs an unprivileged user")
def test_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UnsafeFilesystemError, match="nothing can be created"):
        probe_filesystem(tmp_path)


@pytest.mark.parametrize(
    ("free", "reason"),
    [
        ({"f_bavail": 1, "f_favail": 10**6}, "MiB are free"),
        ({"f_bavail": 10**9, "f_favail": 7}, "only 7 inodes are free"),
    ],
)
def test_full_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, int], reason: str
) -> None:
    found = SimpleNamespace(f_frsize=4096, f_files=10**6, **free)
    monkeypatch.setattr("hpcroll.fs.probe.os.statvfs", lambda path: found)
    with pytest.raises(UnsafeFilesystemError, match=reason):
        probe_filesystem(tmp_path)


def test_file_system_without_counted_inodes_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(f_frsize=4096, f_files=0, f_favail=0, f_bavail=10**9)
    monkeypatch.setattr("hpcroll.fs.probe.os.statvfs", lambda path: found)
    assert probe_filesystem(tmp_path).free_inodes is None
