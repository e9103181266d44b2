"""The sandbox contract, kept in images: bwrap and the real apptainer, directory and SIF file."""

from __future__ import annotations

import pytest

from hpcroll.config import SandboxConfig
from hpcroll.sandboxes.apptainer import ApptainerProvider
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.testing.sandbox_containment import ContainmentSuite
from hpcroll.testing.sandbox_suite import SandboxSuite
from tests.capabilities import IMAGES


def with_image(config: SandboxConfig, name: str, image: str) -> SandboxConfig:
    return config.model_copy(update={"name": name, "image": str(IMAGES / image)})


@pytest.mark.apptainer
class TestBwrapDirectory(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return BwrapProvider(with_image(config, "bwrap", "base"))


@pytest.mark.apptainer
class TestApptainerDirectory(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return ApptainerProvider(with_image(config, "apptainer", "base"))


@pytest.mark.apptainer
class TestApptainerSif(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return ApptainerProvider(with_image(config, "apptainer", "base.sif"))
