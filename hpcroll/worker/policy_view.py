"""What the gateway asks the policy registry on every call, kept in memory and refreshed beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hpcroll.contract import PolicyId
from hpcroll.errors import HpcrollError
from hpcroll.fs import RunPaths
from hpcroll.gateway import Upstream
from hpcroll.gateway.admission import Admission
from hpcroll.policy import AdmissionState, Gate, Pauses, PolicyRegistry, PolicyVersion

log = logging.getLogger(__name__)

REFRESH_S = 1.0
DRAIN_LOOK_S = 0.1
"""Seconds between two looks at the calls in flight while a pause waits for them."""
UNPUBLISHED = "unpublished"
"""Lineage of what is sampled before a trainer has published anything."""
ENDPOINT_SILENCE_S = 60.0
"""Silence after which a registered inference server is no longer asked."""
_HISTORY = 64
"""Published versions that are remembered, to tell the lineage of a version that an engine names."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    admission: AdmissionState
    upstreams: tuple[Upstream, ...]
    latest: PolicyVersion | None
    versions: tuple[PolicyVersion, ...]


class PolicyView:
    """The servers, the latest policy version and the pauses, about `REFRESH_S` old; an async context.

    It drives `admission` and tells everybody, through `gate`, what that acts on.
    """

    def __init__(
        self, paths: RunPaths, policy_name: str, *, admission: Admission, gate: Gate | None = None
    ) -> None:
        self._registry = PolicyRegistry(paths)
        self._pauses = Pauses(paths)
        self._name = policy_name
        self._admission = admission
        self._gate = gate
        self._upstreams: tuple[Upstream, ...] = ()
        # Before the first publication there is one policy without a number: its tokens are as good.
        self._policy = PolicyId(policy_name=policy_name, lineage=UNPUBLISHED, version_low=0, version_high=0)
        self._history: tuple[PolicyId, ...] = ()
        self._refreshing: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[None] | None = None
        """Done when the read that is under way has ended."""
        self._next_read: asyncio.Task[None] | None = None

    def upstreams(self) -> tuple[Upstream, ...]:
        """The registered servers whose heartbeat moves."""
        return self._upstreams

    def policy(self) -> PolicyId:
        """The version that was published last; version 0 of lineage `UNPUBLISHED` before the first."""
        return self._policy

    def history(self) -> tuple[PolicyId, ...]:
        """The versions that were published of late, oldest first."""
        return self._history

    async def policy_now(self) -> PolicyId:
        """The same as `policy`, read anew: not older than this call.

        A trainer publishes a version before an engine loads it, so that whatever an engine sampled until
        now is at most of this version. Where the registry cannot be read, what is known stands.
        """
        if self._reading is None:
            await self._read_latest()
            return self._policy
        # Whoever asks while a read is under way shares the next one with all others who do.
        if self._next_read is None:
            self._next_read = asyncio.create_task(self._read_next(self._reading))
        await asyncio.shield(self._next_read)
        return self._policy

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._pauses.prepare)
        await self._refresh()
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
        for reading in (self._reading, self._next_read):
            if reading is not None:
                await reading
        if self._gate is not None:
            with contextlib.suppress(OSError):  # the word of this worker's parent does as well
                await asyncio.to_thread(self._gate.withdraw)

    async def _read_next(self, reading: asyncio.Future[None]) -> None:
        await reading
        self._next_read = None
        await self._read_latest()

    async def _read_latest(self) -> None:
        reading = self._reading = asyncio.get_running_loop().create_future()
        try:
            self._note(await asyncio.to_thread(self._registry.latest, self._name))
        except (OSError, HpcrollError) as error:
            log.warning("policy registry not read: %s", error)
        finally:
            if self._reading is reading:
                self._reading = None
            reading.set_result(None)

    async def _keep_fresh(self) -> None:
        while True:
            await self._rest()
            try:
                await self._refresh()
            except (OSError, HpcrollError) as error:
                # A stalled file server must not end the worker; what is known stays in use.
                log.warning("policy registry not read: %s", error)

    async def _rest(self) -> None:
        """Waits until the next look is due, or until the last call of a pause has ended."""
        end = asyncio.get_running_loop().time() + REFRESH_S
        draining = not self._admission.is_open and self._admission.in_flight > 0
        while (left_s := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left_s, DRAIN_LOOK_S) if draining else left_s)
            if draining and not self._admission.in_flight:
                return

    async def _refresh(self) -> None:
        snapshot = await asyncio.to_thread(self._read)
        self._upstreams = snapshot.upstreams
        self._history = tuple(map(_policy_id, snapshot.versions[-_HISTORY:]))
        self._note(snapshot.latest)
        # Last: a call that is admitted from here on sees the versions that were published in the pause.
        self._admission.apply(snapshot.admission)
        for pause in self._admission.expired():
            log.warning("pause=%s expired after %g s; made by %s", pause.name, pause.max_s, pause.made_by)
            # For those who start later: they would wait for its whole time again.
            await asyncio.to_thread(self._pauses.lift, pause.name, serial=pause.serial)
        if self._gate is not None:
            # Only a closed gate is waited for; an open one would write with every call.
            in_flight = 0 if self._admission.is_open else self._admission.in_flight
            await asyncio.to_thread(self._gate.report, self._admission.generation, in_flight)

    def _read(self) -> _Snapshot:
        # In this order: a trainer publishes before it lifts its pause.
        admission = self._pauses.read()
        endpoints = self._registry.endpoints(ENDPOINT_SILENCE_S)
        return _Snapshot(
            admission=admission,
            upstreams=tuple(
                Upstream(endpoint.url, endpoint.kind, endpoint.served_name, endpoint.version)
                for endpoint in endpoints
            ),
            latest=self._registry.latest(self._name),
            versions=tuple(entry for entry in self._registry.versions() if entry.policy_name == self._name),
        )

    def _note(self, latest: PolicyVersion | None) -> None:
        if latest is None:
            return
        policy, known = _policy_id(latest), self._history
        if policy not in known:
            self._history = (*known, policy)
        elif self._policy in known and known.index(policy) < known.index(self._policy):
            return  # two reads overlapped, and the older one ended last
        self._policy = policy


def _policy_id(version: PolicyVersion) -> PolicyId:
    return PolicyId(
        policy_name=version.policy_name,
        lineage=version.lineage,
        version_low=version.version,
        version_high=version.version,
    )
