"""Inference servers are live while their heartbeat moves, as each observer's own clock sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcroll.errors import ConfigError
from hpcroll.fs import RunPaths, make_directories
from hpcroll.policy import PolicyRegistry
from hpcroll.policy.endpoints import EndpointWatch
from tests.clock import Clock


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    make_directories(list(paths.directories()))
    return paths


def test_registered_server_is_listed_with_what_it_said(paths: RunPaths) -> None:
    lease = PolicyRegistry(paths).register_endpoint("http://gpu1:8000", "qwen", version=3)
    (found,) = PolicyRegistry(paths).endpoints(30.0)
    assert found == lease.endpoint
    assert (found.url, found.served_name, found.version, found.kind) == (
        "http://gpu1:8000",
        "qwen",
        3,
        "vllm",
    )


def test_silent_server_drops_out_and_comes_back_with_its_next_beat(paths: RunPaths) -> None:
    clock = Clock()
    watch = EndpointWatch(paths, clock=clock)
    quiet = PolicyRegistry(paths).register_endpoint("http://a:1", "m")
    loud = PolicyRegistry(paths).register_endpoint("http://b:1", "m")
    assert {endpoint.url for endpoint in watch.live(30)} == {"http://a:1", "http://b:1"}
    clock.now_s += 31
    loud.beat()
    assert [endpoint.url for endpoint in watch.live(30)] == ["http://b:1"]
    quiet.beat()
    assert {endpoint.url for endpoint in watch.live(30)} == {"http://a:1", "http://b:1"}


def test_withdrawn_server_is_gone_at_once(paths: RunPaths) -> None:
    registry = PolicyRegistry(paths)
    lease = registry.register_endpoint("http://a:1", "m")
    assert len(registry.endpoints(30)) == 1
    lease.withdraw()
    lease.withdraw()
    assert registry.endpoints(30) == ()


def test_server_that_a_stale_listing_still_names_is_not_live(paths: RunPaths) -> None:
    lease = PolicyRegistry(paths).register_endpoint("http://a:1", "m")
    watch = EndpointWatch(paths)
    assert len(watch.live(30)) == 1
    paths.endpoint_beat(lease.endpoint.endpoint_id).unlink()
    assert watch.live(30) == ()


@pytest.mark.parametrize("url", ["gpu1:8000", "ftp://gpu1", "http://", ""])
def test_what_is_no_http_url_is_refused(paths: RunPaths, url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        PolicyRegistry(paths).register_endpoint(url, "m")


def test_kind_that_no_gateway_speaks_is_refused(paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match="known: vllm, sglang"):
        PolicyRegistry(paths).register_endpoint("http://a:1", "m", kind="tgi")
