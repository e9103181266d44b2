"""The writer: owner only, one record per rollout, nothing visible of a write that failed."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcroll.config import ShardConfig
from hpcroll.errors import ShardError
from hpcroll.shards import ShardWriter, encode_trajectory, open_run
from hpcroll.shards.format.commit_log import parse_marks
from tests.shard_runs import ShardRun, bulk, trajectory


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Makes the kernel refuse writes past `size_bytes`, part of a write included, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_record_stands_at_its_address(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        addresses = [writer.append(trajectory(n)) for n in range(5)]
        data = writer.path.read_bytes()
    for n, address in enumerate(addresses):
        assert data[address.offset : address.offset + address.length] == encode_trajectory(trajectory(n))
    assert sum(address.length for address in addresses) == len(data)


def test_second_record_of_a_rollout_is_refused(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        writer.append(trajectory(1))
        with pytest.raises(ShardError, match="start a new incarnation"):
            writer.append(trajectory(1, attempt=2))


def test_record_of_another_incarnation_is_refused(run: ShardRun) -> None:
    with run.writer("w0") as writer, pytest.raises(ShardError, match="'w1'"):
        writer.append(trajectory(1, incarnation="w1"))


def test_incarnation_that_was_started_twice_is_refused(run: ShardRun) -> None:
    with run.writer("w0"), pytest.raises(FileExistsError):
        run.writer("w0")


def test_full_shard_is_followed_by_the_next(run: ShardRun) -> None:
    with run.writer("w0", shard_mb=1) as writer:
        addresses = [address for n in range(20) for address in run.commit(writer, "w0", [n], **bulk(n))]
    assert {address.shard_index for address in addresses} == {0, 1}
    sizes = [run.paths.shard_file("w0", index).stat().st_size for index in (0, 1)]
    assert max(sizes) <= 1 << 20
    marks = [parse_marks(run.paths.commit_log("w0", index).read_bytes())[0] for index in (0, 1)]
    assert [*marks[0], *marks[1]] == addresses
    assert [item.ref.ordinal for item in open_run(run.paths.root)] == list(range(20))


def test_write_that_the_file_system_refuses_leaves_no_record(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        run.commit(writer, "w0", [0])
        size = writer.path.stat().st_size
        with file_size_limit(size + 100), pytest.raises(OSError, match="File too large"):
            writer.append(trajectory(1))
        assert writer.path.stat().st_size == size
        # The same rollout may be appended again: its first record never was.
        run.commit(writer, "w0", [1, 2])
        assert [stored.ref.ordinal for stored in open_run(run.paths.root)] == [0, 1, 2]


def test_failed_fsync_ends_the_writer(run: ShardRun) -> None:
    """A second fsync may report success for pages that the kernel dropped after the first."""
    broken = [False]

    def fsync(descriptor: int) -> None:
        if broken[0]:
            raise OSError(errno.EIO, "Input/output error")
        os.fsync(descriptor)

    run.register("w0")
    with ShardWriter(run.paths, "w0", ShardConfig(), fsync=fsync) as writer:
        run.commit(writer, "w0", [0])
        writer.append(trajectory(1))
        broken[0] = True
        with pytest.raises(OSError, match="Input/output"):
            writer.sync()
        broken[0] = False
        for refused in (writer.sync, lambda: writer.append(trajectory(2))):
            with pytest.raises(ShardError, match="fsync failed"):
                refused()
    assert [stored.ref.ordinal for stored in open_run(run.paths.root)] == [0]


def test_owner_only_permissions_and_names(run: ShardRun) -> None:
    with run.writer("w0"):
        names = sorted(path.name for path in run.paths.shards.iterdir())
    assert names == ["w0.0.log", "w0.0.shard"]
    assert all(path.stat().st_mode & 0o022 == 0 for path in run.paths.shards.iterdir())


def test_closed_writer_refuses(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        pass
    with pytest.raises(ShardError, match="closed"):
        writer.append(trajectory(0))
    writer.close()


def test_appends_from_many_threads_do_not_mix(run: ShardRun) -> None:
    with run.writer("w0") as writer:

        def work(first: int) -> None:
            for n in range(first, 40, 4):
                run.commit(writer, "w0", [n], turns=2)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stored = list(open_run(run.paths.root))
    assert sorted(item.ref.ordinal for item in stored) == list(range(40))
    for item in stored:
        assert item.record == trajectory(item.ref.ordinal, turns=2).record
