"""Images made by the real apptainer through spython, without root or registry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hpcroll.config import SandboxConfig
from hpcroll.errors import ImageError
from hpcroll.sandboxes import image_store, images
from hpcroll.sandboxes.apptainer import ApptainerProvider
from hpcroll.sandboxes.base import SandboxSpec
from tests.capabilities import IMAGES

FAST = ("--mksquashfs-args", "-comp zstd -Xcompression-level 1")
DEFINITION = """
Bootstrap: localimage
From: {base}

%post
    echo made > /made

%environment
    export OF_THE_IMAGE=yes
    export LANG=of-the-image
"""


@pytest.mark.full
@pytest.mark.apptainer
def test_a_built_image_starts_with_its_own_files_and_environment(tmp_path: Path) -> None:
    (tmp_path / "image.def").write_text(DEFINITION.format(base=IMAGES / "base"))
    dest = tmp_path / "image.sif"
    digest = image_store.build(str(tmp_path / "image.def"), dest, options=FAST, scratch=tmp_path)
    config = SandboxConfig(image=str(dest), scratch=tmp_path)
    provider = ApptainerProvider(config)
    assert provider.image_digest(None) == digest

    async def body() -> str:
        sandbox = await provider.start(SandboxSpec(name="built", image=None))
        try:
            result = await sandbox.exec(["sh", "-c", "cat /made; echo $OF_THE_IMAGE $LANG"], timeout_s=60)
            return result.stdout.decode()
        finally:
            await sandbox.stop()

    assert asyncio.run(body()) == "made\nyes C.UTF-8\n"
    assert "OF_THE_IMAGE" in str(image_store.inspect(dest, scratch=tmp_path))
    assert [(info.path, info.problem) for info in images.listing(tmp_path)] == [(dest, "")]


@pytest.mark.full
@pytest.mark.apptainer
def test_a_build_that_fails_gives_apptainers_own_words(tmp_path: Path) -> None:
    text = DEFINITION.format(base=IMAGES / "base").replace("echo made > /made", "echo about to fail; exit 3")
    (tmp_path / "image.def").write_text(text)
    with pytest.raises(ImageError, match="about to fail"):
        image_store.build(str(tmp_path / "image.def"), tmp_path / "image.sif", options=FAST, scratch=tmp_path)
    assert [path.name for path in tmp_path.glob("*.sif")] == []
