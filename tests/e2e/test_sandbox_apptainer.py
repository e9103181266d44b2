"""What only apptainer has: the ladder of writable roots, and fakeroot."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from hpcroll.config import SandboxConfig
from hpcroll.errors import ImageError, IsolationUnavailableError, SandboxError
from hpcroll.sandboxes.apptainer import ApptainerProvider
from hpcroll.sandboxes.base import Sandbox, SandboxSpec
from hpcroll.testing.sandbox_bench import PATIENCE_S, sh
from tests.capabilities import IMAGES

pytestmark = pytest.mark.apptainer


def provider(tmp_path: Path, image: str = "base", **config: Any) -> ApptainerProvider:
    return ApptainerProvider(SandboxConfig(image=str(IMAGES / image), scratch=tmp_path, **config))


def output(source: ApptainerProvider, script: str) -> bytes:
    async def body() -> bytes:
        sandbox: Sandbox = await source.start(SandboxSpec(name="ladder", image=None))
        try:
            return (await sandbox.exec(sh(script), timeout_s=PATIENCE_S)).stdout
        finally:
            await sandbox.stop()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("way", "image"),
    [
        ("overlay", "base"),
        ("overlay", "base.sif"),
        ("tmpfs", "base"),
        ("tmpfs", "base.sif"),
        pytest.param("copy", "base", marks=pytest.mark.full),
    ],
)
def test_each_way_makes_the_root_writable_and_keeps_the_image_as_it_is(
    tmp_path: Path, way: str, image: str
) -> None:
    source = provider(tmp_path, image, options={"writable_root": [way]})
    assert source.probe().writable_root == way
    assert (
        output(source, "echo changed > /change && cat /change; echo x > /work/x && echo work")
        == b"changed\nwork\n"
    )
    assert output(source, "cat /change") == b""
    assert not (IMAGES / "base" / "change").exists()


def test_a_read_only_root_is_reported_as_such_and_has_writable_places(tmp_path: Path) -> None:
    source = provider(tmp_path, options={"writable_root": ["read-only"]})
    capabilities = source.probe()
    assert capabilities.available
    assert capabilities.writable_root is None
    assert "writable_root" in capabilities.reasons
    assert output(source, "touch /change || touch /work/x /tmp/x $HOME/x && echo work") == b"work\n"


def test_the_ladder_is_climbed_down_to_the_first_way_that_works(tmp_path: Path) -> None:
    # A SIF file cannot be copied, and nothing would limit an overlay.
    source = provider(
        tmp_path, "base.sif", disk_mb=32, options={"writable_root": ["copy", "overlay", "tmpfs"]}
    )
    assert source.probe().writable_root == "tmpfs"
    unusable = provider(tmp_path, "base.sif", options={"writable_root": ["copy"]})
    assert not unusable.probe().available
    with pytest.raises(SandboxError, match="only a directory image can be copied"):
        output(unusable, "true")


def test_fakeroot_owns_other_users_files_and_all_of_them_are_removed(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("fakeroot is for unprivileged users")
    source = provider(tmp_path, options={"fakeroot": True})
    script = "id -u; touch file; chown 33:33 file; mkdir -m 700 dir; touch dir/x; chown -R 44 dir; "
    assert output(source, script + "stat -c %u file dir") == b"0\n33\n44\n"
    assert list(tmp_path.rglob("ladder-*")) == []


def test_a_task_may_bring_its_own_image(tmp_path: Path) -> None:
    source = provider(tmp_path)
    source.check(str(IMAGES / "base.sif"))
    assert len(source.image_digest(str(IMAGES / "base.sif")) or "") == 64
    assert source.image_digest(None) is None
    with pytest.raises(ImageError, match="does not exist"):
        source.check("/nowhere.sif")


def test_without_the_program_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    source = provider(tmp_path)
    assert "load its module" in source.probe().reasons["available"]
    with pytest.raises(IsolationUnavailableError, match="load its module"):
        output(source, "true")
