"""Every harness keeps the contract of harnesses."""

from __future__ import annotations

from hpcroll.config import HarnessConfig
from hpcroll.harnesses.base import Harness
from hpcroll.harnesses.react import ReactHarness
from hpcroll.testing.harness_suite import HarnessContract


class TestReact(HarnessContract):
    def make(self, config: HarnessConfig) -> Harness:
        return ReactHarness(config)
