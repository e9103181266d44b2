"""The gateway: a node-local model endpoint that records every token."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from hpcroll.config import ModelConfig
from hpcroll.contract import PolicyId, Rollout
from hpcroll.gateway.endpoint import ModelEndpoint
from hpcroll.gateway.exchange import answer_chat
from hpcroll.gateway.journal import Journal
from hpcroll.gateway.refusal import Refusal, wrong_key
from hpcroll.gateway.session import GatewaySession, Services
from hpcroll.gateway.upstream import Upstream, UpstreamPool

_KEY_BYTES = 32
_REQUEST_BYTES = 1 << 28
_SHUTDOWN_S = 0.5


class Gateway:
    """The model endpoint of one worker, in the worker's event loop.

    `upstreams` lists the inference servers that are there now, besides `config.endpoints`; `policy`
    names the versions that a server may be serving now (None: no policy was published). Both are called
    for every model call and must not block. The journal is opened and closed by its owner.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        journal: Journal,
        upstreams: Callable[[], Sequence[Upstream]] = tuple,
        policy: Callable[[], PolicyId | None] = lambda: None,
    ) -> None:
        pool = UpstreamPool(config, upstreams)
        self._services = Services(config, journal, pool, policy)
        self._sessions: dict[str, GatewaySession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1; raises `ConfigError` where the API key is not set."""
        await self._services.pool.start()
        self._runner = await _runner(self._session_of)
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
            serve=_serve_socket,
            closed=lambda: self._sessions.pop(key, None),
        )
        self._sessions[key] = session
        return session

    def _session_of(self, request: web.Request) -> GatewaySession:
        # Other users of the node reach this port: only the key, 256 random bits, tells sessions apart.
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("X-Api-Key", "")
        session = self._sessions.get(key.strip())
        if session is None:
            raise wrong_key()
        return session


async def _serve_socket(session: GatewaySession, sock: socket.socket) -> web.AppRunner:
    runner = await _runner(lambda _: session)
    await web.SockSite(runner, sock).start()
    return runner


async def _runner(session_of: Callable[[web.Request], GatewaySession]) -> web.AppRunner:
    async def chat(request: web.Request) -> web.StreamResponse:
        try:
            session = session_of(request)
        except Refusal as refusal:
            return refusal.response()
        return await session.track(asyncio.ensure_future(answer_chat(session, request)))

    async def models(request: web.Request) -> web.StreamResponse:
        try:
            session = session_of(request)
        except Refusal as refusal:
            return refusal.response()
        model = {"id": session.outside.model, "object": "model", "owned_by": "hpcroll"}
        return web.json_response({"object": "list", "data": [model]})

    app = web.Application(client_max_size=_REQUEST_BYTES)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    # An agent that hangs up frees the inference server's slot: its handler is cancelled.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    return runner
