"""Files appear whole or not at all, and a name is never taken twice."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcroll.fs import fsync_directory, list_names, make_directories, publish, read_fresh, replace


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_publish_does_not_replace(tmp_path: Path) -> None:
    assert publish(tmp_path / "name", b"first")
    assert not publish(tmp_path / "name", b"second")
    assert read_fresh(tmp_path / "name") == b"first"
    assert names(tmp_path) == ["name"]


def test_publish_of_the_same_bytes_counts_as_ours(tmp_path: Path) -> None:
    """So looks a request that was sent twice because its first answer was lost."""
    assert publish(tmp_path / "name", b"same")
    assert publish(tmp_path / "name", b"same")


def test_exactly_one_of_many_publishers_gets_the_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda i: publish(tmp_path / "name", b"%d" % i), range(64)))
    assert sum(won) == 1
    assert read_fresh(tmp_path / "name") == b"%d" % won.index(True)
    assert names(tmp_path) == ["name"]


def test_publish_into_a_missing_directory_raises_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "absent" / "name", b"data")
    assert names(tmp_path) == []


def test_replace_leaves_old_or_new(tmp_path: Path) -> None:
    replace(tmp_path / "name", b"old")
    replace(tmp_path / "name", b"new")
    assert read_fresh(tmp_path / "name") == b"new"
    assert names(tmp_path) == ["name"]


def test_unfinished_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".name.0123").write_bytes(b"half")
    (tmp_path / "name").write_bytes(b"whole")
    assert list_names(tmp_path) == ["name"]
    assert list_names(tmp_path / "absent") == []


def test_made_directories_have_their_parents(tmp_path: Path) -> None:
    wanted = [tmp_path / "a" / "b" / "c", tmp_path / "a" / "d"]
    make_directories(wanted)
    make_directories(wanted)
    assert all(path.is_dir() for path in wanted)


@pytest.mark.parametrize(("code", "matters"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_directory_fsync_fails_only_where_it_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, matters: bool
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("hpcroll.fs.atomic.os.fsync", fsync)
    if matters:
        with pytest.raises(OSError, match="Input/output error"):
            fsync_directory(tmp_path)
    else:
        fsync_directory(tmp_path)
