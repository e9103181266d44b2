"""Capabilities by mark, and the scripted policy server that runs beside a test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from hpcroll.testing.policy_server import Script, write_scripts
from tests.capabilities import need

MARKS = ("slurm", "apptainer", "sharedfs")
TOGETHER = ("slurm", "real_engine")
"""What the names say of tests that go to one process: they disturb each other, or share a slow server."""


class _OneCluster(LoadScopeScheduling):  # type: ignore[misc]
    """Spreads tests one by one, but those of `TOGETHER` stay together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for name in TOGETHER if name in nodeid), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _OneCluster(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slurm") and "slurm" not in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} uses the cluster: its name must say slurm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in MARKS:
        if item.get_closest_marker(mark):
            need(mark)


@pytest.fixture
def serve_scripts(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts scripted policy servers as processes; each call returns a base URL."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(
        scripts: Sequence[Script], *, seed: int = 1, log: Path | None = None, options: Sequence[str] = ()
    ) -> str:
        folder = tmp_path / f"policy-server-{len(servers)}"
        folder.mkdir()
        write_scripts(scripts, folder / "scripts.jsonl")
        port_file = folder / "port"
        argv = [sys.executable, "-m", "hpcroll.testing.policy_server", "--seed", str(seed)]
        argv += ["--scripts", str(folder / "scripts.jsonl"), "--port", "0", "--port-file", str(port_file)]
        argv += ["--log", str(log)] if log is not None else []
        argv += options
        with (folder / "log").open("wb") as output:
            server = subprocess.Popen(argv, stdout=output, stderr=output)
        servers.append(server)
        deadline = time.monotonic() + 120
        while not (port_file.exists() and port_file.read_text().strip()):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, f"no policy server: {(folder / 'log').read_text()}"
            time.sleep(0.05)
        return f"http://127.0.0.1:{port_file.read_text().strip()}"

    yield start
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait(60)


@pytest.fixture
def shared_run_dir(tmp_path: Path) -> Path:
    """A run directory that every node of the test cluster sees."""
    return tmp_path / "run"
