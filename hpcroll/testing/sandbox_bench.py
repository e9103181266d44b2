"""What the sandbox suites share: how a test makes its sandbox, and how it waits."""

from __future__ import annotations

import asyncio
import os
import secrets
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from hpcroll.config import SandboxConfig
from hpcroll.sandboxes.base import ExecResult, Sandbox, SandboxProvider, SandboxSpec

PATIENCE_S = 60.0
"""Longest that any condition is waited for; far above what it takes on a busy machine."""

Body = Callable[[Sandbox], Awaitable[Any]]


def sh(script: str) -> list[str]:
    return ["sh", "-c", textwrap.dedent(script)]


def python(script: str) -> list[str]:
    return ["python3", "-c", textwrap.dedent(script)]


def living(marker: str) -> list[int]:
    """Pids of this node's processes whose command line holds `marker`, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line, status = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except OSError:
                continue
            if marker.encode() in line and status.rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for `condition`; fails with `what` after `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.01)


class SandboxBench:
    """How a suite makes its provider and its sandboxes."""

    def make(self, config: SandboxConfig) -> SandboxProvider:
        """The provider under test, with `config` changed where it needs an image or options."""
        raise NotImplementedError

    def provider(self, tmp_path: Path, **config: Any) -> SandboxProvider:
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        return self.make(SandboxConfig(scratch=scratch, **config))

    def run(self, tmp_path: Path, body: Body, **config: Any) -> Any:
        """The result of `body` in a fresh sandbox."""
        return asyncio.run(self.within(self.provider(tmp_path, **config), body))

    async def within(self, provider: SandboxProvider, body: Body) -> Any:
        sandbox = await provider.start(SandboxSpec(name=f"test-{secrets.token_hex(3)}", image=None))
        try:
            return await body(sandbox)
        finally:
            await sandbox.stop()

    def exec(self, tmp_path: Path, argv: Sequence[str], *, config: Any = None, **options: Any) -> ExecResult:
        """The result of one command in a fresh sandbox."""

        async def body(sandbox: Sandbox) -> ExecResult:
            return await sandbox.exec(argv, **{"timeout_s": PATIENCE_S} | options)

        result: ExecResult = self.run(tmp_path, body, **(config or {}))
        return result
