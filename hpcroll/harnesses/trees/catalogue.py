"""The agent programs that hpcroll and its plug-ins know, and whether they work on this node."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hpcroll.config import HarnessConfig, SandboxConfig
from hpcroll.config.models import Options
from hpcroll.errors import HarnessError, PluginError
from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.programs.base import MACHINE, TREE, Program, fill_text
from hpcroll.plugins import Family, known, load
from hpcroll.sandboxes.base import SandboxProvider, SandboxSpec

_CHECK_S = 300.0


def programs() -> dict[str, Program]:
    """The programs that can be installed, by the name of their harness."""
    found = {}
    for name in known(Family.HARNESS):
        program = getattr(load(Family.HARNESS, name), "program", None)
        if isinstance(program, Program) and program.install is not None:
            found[name] = program
    return found


def program(name: str) -> Program:
    """The program of harness `name`; raises `PluginError`, which lists the known ones."""
    found = programs()
    if name not in found:
        raise PluginError(f"no agent is named {name!r}; known: {', '.join(found)}")
    return found[name]


def check(name: str, sandbox: SandboxConfig, *, store: Path | None = None, version: str | None = None) -> str:
    """What the installed agent says of its version, started in a sandbox of this node.

    Raises `ConfigError` where it is not installed, `HarnessError` with its words where it does not start.
    """
    options: Options = {"store": None if store is None else str(store), "version": version}
    harness: BlackBoxHarness = load(Family.HARNESS, name)(HarnessConfig(name=name, options=options))
    provider: SandboxProvider = load(Family.SANDBOX, sandbox.name)(sandbox)
    return asyncio.run(_check(harness, provider, sandbox.scratch))


async def _check(harness: BlackBoxHarness, provider: SandboxProvider, scratch: Path) -> str:
    mounts = tuple(await asyncio.to_thread(harness.mounts, scratch))
    argv = [fill_text(word, {"tree": TREE, **MACHINE}) for word in harness.program.version_argv]
    sandbox = await provider.start(
        SandboxSpec(name=f"check-{harness.program.name}", image=None, binds=mounts)
    )
    try:
        result = await sandbox.exec(argv, timeout_s=_CHECK_S)
    finally:
        await sandbox.stop()
    said = (result.stdout or result.stderr).decode(errors="replace").strip()
    if result.exit_code != 0:
        raise HarnessError(
            f"agent {harness.program.name} does not start: exit code {result.exit_code}: {said[-1000:]}"
        )
    return said
