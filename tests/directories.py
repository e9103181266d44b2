"""Fresh directory sandboxes, for tests of evaluators."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hpcroll.evaluators.base import FreshSandbox
from hpcroll.sandboxes.base import Sandbox
from hpcroll.testing.directory_sandbox import DirectorySandbox


def directory_sandbox(root: Path) -> DirectorySandbox:
    """A new sandbox below `root`."""
    home = root / f"sandbox-{secrets.token_hex(4)}"
    home.mkdir(parents=True)
    return DirectorySandbox(home, name=home.name)


def fresh_directories(root: Path) -> FreshSandbox:
    """Starts a new sandbox below `root` at every call."""

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        yield directory_sandbox(root)

    return fresh
