"""The gateway: a node-local model endpoint that records every token."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from hpcroll.config import ModelConfig
from hpcroll.contract import PolicyId, Rollout
from hpcroll.gateway.admission import Admission
from hpcroll.gateway.attribution import PolicySource
from hpcroll.gateway.endpoint import ModelEndpoint
from hpcroll.gateway.journal import Journal
from hpcroll.gateway.refusal import wrong_key
from hpcroll.gateway.routes import open_routes
from hpcroll.gateway.session import GatewaySession, Services
from hpcroll.gateway.tokens import TokenRenderer, load_renderer
from hpcroll.gateway.upstream import Upstream, UpstreamPool
from hpcroll.plugins import Family, known

_KEY_BYTES = 32
_KEY_HEADERS = ("X-Api-Key", "X-Goog-Api-Key")


class Gateway:
    """The model endpoint of one worker, in the worker's event loop.

    `upstreams` lists the inference servers that are there now, besides `config.endpoints`, and must not
    block; `policy` is what the registry knows; `admission` is the gate that every try of a call passes,
    driven by whoever watches the registry. The journal is opened and closed by its owner.

    Raises `ConfigError` where mode `tokens` cannot render.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        journal: Journal,
        upstreams: Callable[[], Sequence[Upstream]] = tuple,
        policy: PolicySource | Callable[[], PolicyId | None] = lambda: None,
        admission: Admission | None = None,
    ) -> None:
        pool = UpstreamPool(config, upstreams)
        source = policy if isinstance(policy, PolicySource) else PolicySource(known=policy)
        renderer = load_renderer(config)
        self._services = Services(config, journal, pool, source, admission or Admission(), renderer)
        self._dialects = [point.load()(config.name) for point in known(Family.DIALECT).values()]
        self._sessions: dict[str, GatewaySession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def renderer(self) -> TokenRenderer | None:
        """What renders in mode `tokens`."""
        return self._services.renderer

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1; raises `ConfigError` where the API key is not set."""
        await self._services.pool.start()
        self._runner = await open_routes(self._dialects, self._session_of)
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Closes every session and stops listening; idempotent."""
        for session in list(self._sessions.values()):
            await session.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._services.pool.close()

    def open_session(self, rollout: Rollout, attempt: int, *, max_calls: int | None = None) -> GatewaySession:
        """The model for one attempt of `rollout`; after `max_calls` replies the turn limit refuses.

        Close it before its calls are built into a trajectory.
        """
        key = f"hpcroll-{secrets.token_urlsafe(_KEY_BYTES)}"
        config = self._services.config
        session = GatewaySession(
            self._services,
            rollout,
            attempt,
            outside=ModelEndpoint(
                f"http://127.0.0.1:{self._port}/v1",
                key,
                config.name,
                context_tokens=config.context_tokens,
                reply_tokens=config.sampling.max_tokens or 4096,
            ),
            max_calls=max_calls,
            serve=self._serve_socket,
            closed=lambda: self._sessions.pop(key, None),
        )
        self._sessions[key] = session
        return session

    def _session_of(self, request: web.Request) -> GatewaySession:
        # Other users of the node reach this port: only the key, 256 random bits, tells sessions apart.
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = next((request.headers[name] for name in _KEY_HEADERS if name in request.headers), "")
        session = self._sessions.get(key.strip() or request.query.get("key", ""))
        if session is None:
            raise wrong_key()
        return session

    async def _serve_socket(self, session: GatewaySession, sock: socket.socket) -> web.AppRunner:
        runner = await open_routes(self._dialects, lambda _: session)
        await web.SockSite(runner, sock).start()
        return runner
