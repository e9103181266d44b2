"""Scratch: removed whatever is in it, and never another's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hpcroll.config import SandboxConfig, StartLimits
from hpcroll.errors import SandboxError
from hpcroll.sandboxes.attendant.removal import remove_tree
from hpcroll.sandboxes.base import SandboxSpec
from hpcroll.sandboxes.scratch import Scratch, sweep
from hpcroll.sandboxes.starts import Starts


def test_removal_takes_closed_and_very_deep_directories(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "closed" / "inner").mkdir(parents=True)
    (root / "closed" / "inner" / "file").touch()
    (root / "closed" / "inner").chmod(0)
    (root / "closed").chmod(0)
    before = Path.cwd()
    os.chdir(root)
    try:
        for _ in range(3000):  # a path far longer than the system takes
            os.mkdir("deep")  # noqa: PTH102
            os.chdir("deep")
    finally:
        os.chdir(before)
    remove_tree(root)
    assert not root.exists()


def test_removal_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "to-directory").symlink_to(outside)
    (root / "to-file").symlink_to(outside / "kept")
    (root / "dangling").symlink_to("nowhere")
    remove_tree(root)
    assert not root.exists()
    assert (outside / "kept").exists()


def test_removal_of_nothing_is_done_already(tmp_path: Path) -> None:
    remove_tree(tmp_path / "never-was")


def test_a_sweep_leaves_what_is_held_and_what_is_no_workers(tmp_path: Path) -> None:
    held = Scratch(tmp_path)
    (held.root.parent / "start-slots").mkdir()
    assert sweep(tmp_path) == []
    held.close()
    assert not held.root.exists()
    assert (held.root.parent / "start-slots").exists()


def test_two_sandboxes_of_one_name_have_two_directories(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    first, second = scratch.make("seg1/17 a0:run"), scratch.make("seg1/17 a0:run")
    assert first != second
    assert first.parent == second.parent == scratch.root
    assert "/" not in first.name
    scratch.close()


def test_a_directory_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"hpcroll-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="not ours"):
        Scratch(tmp_path)


@pytest.mark.parametrize(("per_image", "per_node", "most"), [(2, 8, 2), (8, 3, 3)])
def test_no_more_sandboxes_start_at_once_than_the_limits_say(
    tmp_path: Path, per_image: int, per_node: int, most: int
) -> None:
    limits = StartLimits(per_image=per_image, per_node=per_node)
    starts = Starts(SandboxConfig(scratch=tmp_path, start_limits=limits))
    running, seen = 0, []

    async def one(number: int) -> None:
        nonlocal running
        async with starts.slot(SandboxSpec(name=f"s{number}", image="image")):
            running += 1
            seen.append(running)
            await asyncio.sleep(0.001)
            running -= 1

    async def body() -> None:
        await asyncio.gather(*(one(number) for number in range(12)))

    asyncio.run(body())
    assert len(seen) == 12
    assert max(seen) == most


def test_a_failed_start_leaves_no_scratch_and_no_slot_taken(tmp_path: Path) -> None:
    starts = Starts(SandboxConfig(scratch=tmp_path, start_limits=StartLimits(per_image=1, per_node=1)))

    async def fail() -> None:
        async with starts.slot(SandboxSpec(name="failing", image=None)) as scratch:
            assert scratch.is_dir()
            raise SandboxError("did not start")

    async def body() -> None:
        for _ in range(3):
            with pytest.raises(SandboxError):
                await fail()

    asyncio.run(body())
    assert list(tmp_path.rglob("failing-*")) == []
