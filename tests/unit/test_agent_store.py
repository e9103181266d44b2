"""The store of agent programs, and the trees that nodes unpack from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from hpcroll.errors import ConfigError, HarnessError
from hpcroll.harnesses.trees import node, store

WAIT_S = 60.0


def make_tree(root: Path, *, files: int = 3) -> Path:
    """A tree with a program, a library, a link and `files` files."""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "agent").write_text("#!/bin/sh\necho agent\n")
    (root / "bin" / "agent").chmod(0o755)
    (root / "node_modules" / "empty").mkdir(parents=True)
    for number in range(files):
        (root / "node_modules" / f"{number}.js").write_text(f"// {number}\n" * 100)
    (root / "link").symlink_to("bin/agent")
    return root


def publish(tmp_path: Path, **options: Any) -> store.Archive:
    tree = make_tree(tmp_path / "tree", **options)
    return store.publish(tree, tmp_path / "store", name="agent", version="1.0-beta.2")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def unpacked(scratch: Path) -> list[str]:
    """What is in the node's directory of trees, lock files left out."""
    [home] = scratch.glob("hpcroll-*/agents")
    return [name for name in names(home) if not name.endswith(".lock")]


def test_equal_trees_are_equal_archives_whenever_they_were_made(tmp_path: Path) -> None:
    first = publish(tmp_path)
    again = make_tree(tmp_path / "again")
    os.utime(again / "bin" / "agent", (1, 1))
    second = store.publish(again, tmp_path / "store", name="agent", version="1.0-beta.2")
    assert second == first
    assert names(tmp_path / "store") == [first.path.name]
    assert store.file_digest(first.path)[:16] == first.digest


def test_an_archive_is_found_by_its_program_and_version(tmp_path: Path) -> None:
    archive = publish(tmp_path)
    (tmp_path / "store" / "README").write_text("not an archive")
    assert store.listing(tmp_path / "store") == [archive]
    assert store.find(tmp_path / "store", "agent", "1.0-beta.2") == archive
    with pytest.raises(ConfigError, match=r"there: 1.0-beta.2.*hpcroll agents install agent"):
        store.find(tmp_path / "store", "agent", "2.0")
    with pytest.raises(ConfigError, match="hpcroll agents install other"):
        store.find(tmp_path / "nowhere", "other", "1")
    with pytest.raises(ConfigError, match="absolute"):
        store.find(Path("store"), "agent", "1.0-beta.2")


def test_of_two_builds_of_one_version_the_newest_counts(tmp_path: Path) -> None:
    old = publish(tmp_path)
    (tmp_path / "tree" / "more").write_text("more")
    new = store.publish(tmp_path / "tree", tmp_path / "store", name="agent", version="1.0-beta.2")
    assert new != old
    os.utime(old.path, (1, 1))
    assert store.find(tmp_path / "store", "agent", "1.0-beta.2") == new


def test_an_unpacked_tree_is_what_was_packed_and_not_writable(tmp_path: Path) -> None:
    archive = publish(tmp_path)
    (tmp_path / "scratch").mkdir()
    tree = node.unpack(archive, tmp_path / "scratch")
    program = tree / "bin" / "agent"
    assert program.read_text() == "#!/bin/sh\necho agent\n"
    assert stat.S_IMODE(program.stat().st_mode) == 0o555
    assert (tree / "node_modules" / "empty").is_dir()
    assert (tree / "link").readlink() == Path("bin/agent")
    assert time.time() - program.stat().st_mtime < 3600
    before = tree.stat().st_ino
    archive.path.unlink()
    assert node.unpack(archive, tmp_path / "scratch").stat().st_ino == before


@pytest.mark.parametrize("damage", ["changed", "cut", "empty"])
def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    archive = publish(tmp_path)
    data = bytearray(archive.path.read_bytes())
    if damage == "changed":
        data[len(data) // 2] ^= 0xFF
    (tmp_path / "scratch").mkdir()
    archive.path.write_bytes({"changed": data, "cut": data[: len(data) // 2], "empty": b""}[damage])
    with pytest.raises(HarnessError, match=r"is damaged.*agents install agent --force"):
        node.unpack(archive, tmp_path / "scratch")
    assert unpacked(tmp_path / "scratch") == []


def test_an_archive_with_bytes_behind_its_end_is_refused(tmp_path: Path) -> None:
    archive = publish(tmp_path)
    (tmp_path / "scratch").mkdir()
    with archive.path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(HarnessError, match=r"damaged.*agents install agent --force"):
        node.unpack(archive, tmp_path / "scratch")
    assert unpacked(tmp_path / "scratch") == []


def test_many_workers_at_once_share_one_tree(tmp_path: Path) -> None:
    archive = publish(tmp_path, files=400)
    (tmp_path / "scratch").mkdir()
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        found = pool.starmap(_unpack_inode, [(archive, tmp_path / "scratch")] * 8)
    assert len(set(found)) == 1
    assert unpacked(tmp_path / "scratch") == [archive.stem]


def test_a_worker_killed_while_it_unpacks_leaves_nothing_to_others(tmp_path: Path) -> None:
    archive = publish(tmp_path, files=3000)
    (tmp_path / "scratch").mkdir()
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=node.unpack, args=(archive, tmp_path / "scratch"))
    worker.start()
    deadline = time.monotonic() + WAIT_S
    while not list(tmp_path.glob(f"scratch/hpcroll-*/agents/.{archive.stem}.*/node_modules/*.js")):
        assert time.monotonic() < deadline, "the worker unpacks nothing"
        assert worker.is_alive(), "the worker was too fast to be killed"
        time.sleep(0.001)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(WAIT_S)
    [left] = unpacked(tmp_path / "scratch")
    assert left.startswith(f".{archive.stem}.")
    tree = node.unpack(archive, tmp_path / "scratch")
    assert len(names(tree / "node_modules")) == 3001
    assert unpacked(tmp_path / "scratch") == [archive.stem]


def test_publishing_that_fails_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "secret").write_text("x")
    (tmp_path / "tree" / "secret").chmod(0)
    if os.access(tmp_path / "tree" / "secret", os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(PermissionError):
        store.publish(tmp_path / "tree", tmp_path / "store", name="agent", version="1")
    assert names(tmp_path / "store") == []


def _unpack_inode(archive: store.Archive, scratch: Path) -> int:
    return node.unpack(archive, scratch).stat().st_ino
