"""What the providers refuse before anything starts, and what they make of the config."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpcroll.config import SandboxConfig
from hpcroll.errors import ConfigError, ImageError, IsolationUnavailableError
from hpcroll.sandboxes import places
from hpcroll.sandboxes.apptainer import ApptainerProvider
from hpcroll.sandboxes.base import SandboxSpec
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.sandboxes.host import HostProvider
from tests.capabilities import need

OPT_OUT = {"i_know_that_nothing_is_isolated": True}


def start(provider: Any) -> None:
    asyncio.run(provider.start(SandboxSpec(name="refused", image=None)))


@pytest.mark.parametrize(
    "config",
    [
        {"name": "host"},
        {"name": "bwrap", "options": OPT_OUT},
        {"name": "host", "options": {"i_know_that_nothing_is_isolated": False}},
    ],
)
def test_no_isolation_is_refused_unless_it_is_named_twice(tmp_path: Path, config: dict[str, Any]) -> None:
    provider = HostProvider(SandboxConfig(scratch=tmp_path, **config))
    for call in (lambda: provider.check(None), lambda: start(provider)):
        with pytest.raises(IsolationUnavailableError, match="i_know_that_nothing_is_isolated"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", ["memory_mb", "disk_mb"])
def test_limits_that_the_host_cannot_enforce_are_refused_by_name(tmp_path: Path, limit: str) -> None:
    provider = HostProvider(SandboxConfig(name="host", options=OPT_OUT, scratch=tmp_path, **{limit: 64}))
    with pytest.raises(IsolationUnavailableError, match=limit):
        start(provider)


def test_the_host_has_no_images(tmp_path: Path) -> None:
    provider = HostProvider(SandboxConfig(name="host", options=OPT_OUT, scratch=tmp_path))
    provider.check(None)
    with pytest.raises(ImageError, match="no images"):
        provider.check("some.sif")


@pytest.mark.parametrize("provider", [ApptainerProvider, BwrapProvider, HostProvider])
def test_an_unknown_option_is_refused(provider: Any) -> None:
    with pytest.raises(ValidationError, match="fakroot"):
        provider(SandboxConfig(options={"fakroot": True}))


def test_bwrap_takes_the_host_or_a_directory(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").touch()
    provider = BwrapProvider(SandboxConfig(name="bwrap"))
    provider.check(None)
    provider.check("host")
    provider.check(str(tmp_path))
    with pytest.raises(ImageError, match="does not exist"):
        provider.check(str(tmp_path / "missing"))


def test_binds_are_source_and_target_both_absolute(tmp_path: Path) -> None:
    assert places.parse_bind("/data") == (Path("/data"), "/data")
    assert places.parse_bind("/data:/inside") == (Path("/data"), "/inside")
    for text in ("data", "/data:inside", ""):
        with pytest.raises(ConfigError, match="absolute"):
            places.parse_bind(text)
    config = SandboxConfig(binds=(str(tmp_path / "missing"),))
    with pytest.raises(ConfigError, match="missing"):
        list(places.binds(config, SandboxSpec(name="x", image=None)))


def test_a_bind_is_seen_inside_and_cannot_be_written(tmp_path: Path) -> None:
    need("bwrap")
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("from the node")
    provider = BwrapProvider(SandboxConfig(name="bwrap", scratch=tmp_path, binds=(f"{data}:/inside",)))

    async def body() -> tuple[bytes, int | None]:
        spec = SandboxSpec(name="bound", image=None, binds=((data / "file", "/single"),))
        sandbox = await provider.start(spec)
        try:
            read = await sandbox.exec(["cat", "/inside/file", "/single"], timeout_s=60)
            write = await sandbox.exec(["sh", "-c", "echo x > /inside/new"], timeout_s=60)
            return read.stdout, write.exit_code
        finally:
            await sandbox.stop()

    read, write = asyncio.run(body())
    assert read == b"from the node" * 2
    assert write != 0
    assert [path.name for path in data.iterdir()] == ["file"]
