"""Every harness keeps the contract of harnesses."""

from __future__ import annotations

from hpcroll.config import HarnessConfig
from hpcroll.contract import StopReason
from hpcroll.harnesses.base import Harness
from hpcroll.harnesses.command import CommandHarness
from hpcroll.harnesses.react import ReactHarness
from hpcroll.testing.harness_suite import HarnessContract
from hpcroll.testing.loop_agent import OPTIONS


class TestReact(HarnessContract):
    def make(self, config: HarnessConfig) -> Harness:
        return ReactHarness(config)


class TestCommand(HarnessContract):
    config = HarnessConfig(options=OPTIONS)
    ends = StopReason.EXITED

    def make(self, config: HarnessConfig) -> Harness:
        return CommandHarness(config)
