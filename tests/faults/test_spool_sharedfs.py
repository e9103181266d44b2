"""Two caching mounts of one directory: two nodes that see listings late and get misleading errnos."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hpcroll.errors import UnsafeFilesystemError
from hpcroll.fs import filesystem_type, probe_filesystem, read_token
from hpcroll.fs.locks import node_lock
from hpcroll.spool import Incarnation, Spool
from tests.capabilities import SFTP_SERVER
from tests.faults.spool_fleet import Fleet
from tests.spools import PATIENCE_S, check_exactly_one_result, make_config, submit, wait_until

pytestmark = pytest.mark.sharedfs

CACHE_S = 4
"""How long each mount trusts what it saw of names, sizes and listings."""


@contextmanager
def mount(backing: Path, point: Path, *options: str) -> Iterator[Path]:
    """Mounts `backing` on `point` through an SFTP server of its own, with a cache of its own."""
    server = point.with_suffix(".server")
    server.write_text(f"#!/bin/sh\nexec {SFTP_SERVER}\n")
    server.chmod(0o755)
    point.mkdir()
    cached = [f"attr_timeout={CACHE_S}", f"entry_timeout={CACHE_S}", "dir_cache=yes"]
    cached += [f"dcache_timeout={CACHE_S}", f"ssh_command={server}", *options]
    process = subprocess.Popen(["sshfs", "-f", "-o", ",".join(cached), f"localhost:{backing}", str(point)])
    try:
        wait_until(lambda: point.is_mount() or process.poll() is not None, f"{point} is mounted")
        assert process.poll() is None, f"sshfs ended with {process.returncode}"
        yield point
    finally:
        # It unmounts as it ends, and does not wait for a worker that was killed a moment ago to let go.
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            if point.is_mount():
                subprocess.run(["fusermount3", "-u", "-z", str(point)], check=True, timeout=PATIENCE_S)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One directory, seen by two nodes."""
    backing = tmp_path / "backing"
    backing.mkdir()
    with ExitStack() as stack:
        yield tuple(stack.enter_context(mount(backing, tmp_path / node)) for node in ("n1", "n2"))  # type: ignore[misc]


def make_shared_spool(point: Path, *, beat_s: float = 0.3, silence_s: float = 60.0) -> Spool:
    return Spool.create(
        point / "run", make_config(beat_s=beat_s, silence_s=silence_s, attempts={"kill": 100})
    )


def on_backing(mounts: tuple[Path, Path]) -> Spool:
    """The run as its file server sees it."""
    return Spool.open(mounts[0].with_name("backing") / "run")


def test_workers_of_two_mounts_share_a_run(mounts: tuple[Path, Path]) -> None:
    spool = make_shared_spool(mounts[0])
    submit(spool, tasks=20, samples=2)
    with Fleet(on_backing(mounts)) as fleet:
        members = [fleet.start(run=mounts[turn % 2] / "run") for turn in range(4)]
        fleet.wait_all_done()
        claims = [line for member in members for line in member.said("claim")]
    assert len(claims) == len(set(claims)) == 40, "each rollout was claimed once, over both mounts"
    assert check_exactly_one_result(on_backing(mounts)).total() == 40


def test_worker_killed_on_one_mount_is_taken_over_from_the_other(mounts: tuple[Path, Path]) -> None:
    spool = make_shared_spool(mounts[0])
    submit(spool, tasks=4, samples=2)
    with Fleet(on_backing(mounts)) as fleet:
        victim = fleet.start(run=mounts[0] / "run", stop_at="recorded")
        victim.wait_stopped()
        taker = fleet.start(run=mounts[1] / "run")
        wait_until(lambda: len(taker.said("won")) == 7, "the other did all that the victim does not hold")
        victim.kill(mark=True)
        taker.wait_done()
        assert check_exactly_one_result(on_backing(mounts)) == {taker.id: 8}


def test_worker_paused_on_one_mount_loses_to_the_other(mounts: tuple[Path, Path]) -> None:
    spool = make_shared_spool(mounts[0], beat_s=0.3, silence_s=3.0)
    submit(spool, tasks=1, samples=1)
    with Fleet(on_backing(mounts)) as fleet:
        paused = fleet.start(run=mounts[0] / "run", stop_at="recorded")
        paused.wait_stopped()
        taker = fleet.start(run=mounts[1] / "run")
        taker.wait_done()
        paused.wake()
        paused.wait_done()
        assert paused.said("won") == []
        assert check_exactly_one_result(on_backing(mounts)) == {taker.id: 1}


def test_contested_names_have_one_owner_on_both_mounts(mounts: tuple[Path, Path]) -> None:
    """Whatever errno the loser is told."""
    spools = [make_shared_spool(point) for point in mounts]
    workers = [
        Incarnation.register(spool, leg="init+run+eval", rank=rank) for rank, spool in enumerate(spools)
    ]

    def claim(turn: int) -> tuple[bool, bool]:
        names = [spool.paths.policy / f"contested-{turn}" for spool in spools]
        with ThreadPoolExecutor(2) as pair:
            first, second = pair.map(lambda worker, name: worker.claim(name), workers, names)
        owners = {read_token(name) for name in names}
        assert owners == {workers[0].id if first else workers[1].id}
        return first, second

    assert all(first != second for first, second in map(claim, range(100)))


def test_same_submission_over_both_mounts_is_one(mounts: tuple[Path, Path]) -> None:
    first, second = make_shared_spool(mounts[0]), make_shared_spool(mounts[1])
    assert first.run_id == second.run_id
    assert submit(first).created
    assert not submit(second).created


def test_file_system_without_hard_links_is_refused(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.mkdir()
    with (
        mount(backing, tmp_path / "n1", "disable_hardlink") as point,
        pytest.raises(UnsafeFilesystemError, match="makes no hard links") as caught,
    ):
        make_shared_spool(point)
    assert "fuse.sshfs" in str(caught.value)
    assert not (backing / "run" / "run.json").exists()


def test_locks_are_refused_there(mounts: tuple[Path, Path]) -> None:
    assert filesystem_type(mounts[0]) == "fuse.sshfs"
    assert probe_filesystem(mounts[0]).filesystem == "fuse.sshfs"
    with pytest.raises(UnsafeFilesystemError, match=r"fuse\.sshfs"), node_lock(mounts[0] / "lock", 1.0):
        pytest.fail("a lock that the other mount does not see")
