"""The sandbox contract, kept by the providers that need no image; see tests/e2e for the others."""

from __future__ import annotations

from hpcroll.config import SandboxConfig
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.sandboxes.host import HostProvider
from hpcroll.testing.sandbox_containment import ContainmentSuite
from hpcroll.testing.sandbox_suite import SandboxSuite
from tests.capabilities import need

NAMED_OPT_OUT = {"i_know_that_nothing_is_isolated": True}


class TestHost(SandboxSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        return HostProvider(config.model_copy(update={"name": "host", "options": NAMED_OPT_OUT}))


class TestBwrapHostImage(SandboxSuite, ContainmentSuite):
    def make(self, config: SandboxConfig) -> SandboxProvider:
        need("bwrap")
        return BwrapProvider(config.model_copy(update={"name": "bwrap"}))
