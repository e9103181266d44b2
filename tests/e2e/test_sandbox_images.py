"""The sandbox contract, kept in images: bwrap and the real apptainer, directory and SIF file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpcroll.config import SandboxConfig
from hpcroll.sandboxes.apptainer import ApptainerProvider
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.testing.sandbox_containment import ContainmentSuite
from hpcroll.testing.sandbox_suite import SandboxSuite

IMAGES = Path(os.environ.get("HPCROLL_TEST_IMAGES", "/var/lib/hpcroll-test/images"))


def image(name: str) -> str:
    path = IMAGES / name
    if not path.exists():
        pytest.skip(f"no test image {path} (containers/build.sh makes it)")
    return str(path)


def apptainer(config: SandboxConfig, name: str, **options: object) -> ApptainerProvider:
    if shutil.which("apptainer") is None:
        pytest.skip("no apptainer on PATH")
    return ApptainerProvider(config.model_copy(update={"image": image(name), "options": options}))


class TestBwrapDirectory(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return BwrapProvider(config.model_copy(update={"name": "bwrap", "image": image("base")}))


@pytest.mark.apptainer
class TestApptainerDirectory(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return apptainer(config, "base")


@pytest.mark.apptainer
class TestApptainerSif(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return apptainer(config, "base.sif")
