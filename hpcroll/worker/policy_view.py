"""What the gateway asks the policy registry on every call, kept in memory and refreshed beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import Self

from hpcroll.contract import PolicyId
from hpcroll.fs import RunPaths
from hpcroll.gateway import Upstream
from hpcroll.policy import PolicyRegistry

log = logging.getLogger(__name__)

REFRESH_S = 1.0
UNPUBLISHED = "unpublished"
"""Lineage of what is sampled before a trainer has published anything."""
ENDPOINT_SILENCE_S = 60.0
"""Silence after which a registered inference server is no longer asked."""


class PolicyView:
    """The servers and the latest policy version, at most about `REFRESH_S` old; an async context."""

    def __init__(self, paths: RunPaths, policy_name: str) -> None:
        self._registry = PolicyRegistry(paths)
        self._name = policy_name
        self._upstreams: tuple[Upstream, ...] = ()
        # Before the first publication there is one policy without a number: its tokens are as good.
        self._policy = PolicyId(policy_name=policy_name, lineage=UNPUBLISHED, version_low=0, version_high=0)
        self._refreshing: asyncio.Task[None] | None = None

    def upstreams(self) -> tuple[Upstream, ...]:
        """The registered servers whose heartbeat moves."""
        return self._upstreams

    def policy(self) -> PolicyId:
        """The version that was published last; version 0 of lineage `UNPUBLISHED` before the first."""
        return self._policy

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._refresh)
        self._refreshing = asyncio.create_task(self._keep_fresh())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await asyncio.to_thread(self._refresh)
            except OSError as error:
                # A stalled file server must not end the worker; what is known stays in use.
                log.warning("policy registry not read: %s", error)

    def _refresh(self) -> None:
        endpoints = self._registry.endpoints(ENDPOINT_SILENCE_S)
        self._upstreams = tuple(Upstream(endpoint.url) for endpoint in endpoints)
        latest = self._registry.latest(self._name)
        if latest is not None:
            self._policy = PolicyId(
                policy_name=latest.policy_name,
                lineage=latest.lineage,
                version_low=latest.version,
                version_high=latest.version,
            )
