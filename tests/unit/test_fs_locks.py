"""Node-local locks hold over processes, end with them, and refuse shared file systems."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcroll.errors import UnsafeFilesystemError
from hpcroll.fs.locks import node_lock, node_slots

HOLD_LOCK = """
import sys
from pathlib import Path
from hpcroll.fs.locks import node_lock
with node_lock(Path(sys.argv[1]), 30.0):
    print("held", flush=True)
    sys.stdin.read()
"""

HOLD_SLOT = """
import sys
from pathlib import Path
from hpcroll.fs.locks import node_slots
with node_slots(Path(sys.argv[1]), 2, timeout_s=30.0) as slot:
    print(slot, flush=True)
    sys.stdin.read()
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_lock_excludes_another_process_until_that_is_killed(tmp_path: Path) -> None:
    holder = start(HOLD_LOCK, tmp_path / "lock")
    try:
        assert said(holder) == "held"
        with pytest.raises(TimeoutError, match=str(tmp_path / "lock")), node_lock(tmp_path / "lock", 0.2):
            pytest.fail("two holders at once")
    finally:
        end(holder)
    assert holder.returncode == -signal.SIGKILL
    with node_lock(tmp_path / "lock", 30.0):
        pass


def test_lock_is_not_reentrant_over_two_calls(tmp_path: Path) -> None:
    with (
        node_lock(tmp_path / "lock", 1.0),
        pytest.raises(TimeoutError),
        node_lock(tmp_path / "lock", 0.1),
    ):
        pytest.fail("two holders at once")


def test_no_more_holders_than_slots(tmp_path: Path) -> None:
    directory = tmp_path / "slots"
    holders = [start(HOLD_SLOT, directory) for _ in range(2)]
    try:
        assert {said(holder) for holder in holders} == {"0", "1"}
        with pytest.raises(TimeoutError, match="2 slots"), node_slots(directory, 2, timeout_s=0.2):
            pytest.fail("a third holder of two slots")
        freed = holders.pop()
        end(freed)
        with node_slots(directory, 2, timeout_s=30.0) as slot:
            assert slot in (0, 1)
    finally:
        for holder in holders:
            end(holder)


def test_slot_is_free_again_after_an_error_in_the_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), node_slots(tmp_path, 1, timeout_s=1.0):
        raise ZeroDivisionError
    with node_slots(tmp_path, 1, timeout_s=1.0) as slot:
        assert slot == 0


@pytest.mark.parametrize("name", ["nfs4", "lustre", "fuse.sshfs", "gpfs", "never-heard-of"])
def test_locks_on_shared_file_systems_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("hpcroll.fs.locks.filesystem_type", lambda path: name)
    with pytest.raises(UnsafeFilesystemError, match=name), node_lock(tmp_path / "lock", 1.0):
        pytest.fail("a lock that may hold on one node only")
    with (
        pytest.raises(UnsafeFilesystemError, match=r"sandbox\.scratch"),
        node_slots(tmp_path, 1, timeout_s=1.0),
    ):
        pytest.fail("a slot that may hold on one node only")
