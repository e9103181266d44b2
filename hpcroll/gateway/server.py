"""The gateway: a node-local model endpoint that records every token."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from pydantic_core import from_json

from hpcroll.config import ModelConfig
from hpcroll.contract import PolicyId, Rollout
from hpcroll.gateway.admission import Admission
from hpcroll.gateway.attribution import PolicySource
from hpcroll.gateway.dialects.base import Dialect, HttpCall
from hpcroll.gateway.endpoint import ModelEndpoint
from hpcroll.gateway.exchange import Exchange
from hpcroll.gateway.journal import Journal
from hpcroll.gateway.outlet import Outlet, refuse
from hpcroll.gateway.purpose import declared_purpose
from hpcroll.gateway.refusal import Refusal, bad_request, broken_dialect, not_served, wrong_key
from hpcroll.gateway.session import GatewaySession, Services
from hpcroll.gateway.tokens import CannotRenderError, TokenRenderer, load_renderer
from hpcroll.gateway.upstream import Upstream, UpstreamPool
from hpcroll.plugins import Family, known

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

_KEY_BYTES = 32
_REQUEST_BYTES = 1 << 28
_HEADER_BYTES = 1 << 16
"""Agents put what they know of a turn into one header."""
_SHUTDOWN_S = 0.5
_KEY_HEADERS = ("X-Api-Key", "X-Goog-Api-Key")
_LOG = logging.getLogger(__name__)

_Read = TypeVar("_Read")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SessionOf = Callable[[web.Request], GatewaySession]
_Answer = Callable[[Dialect, GatewaySession, web.Request], Awaitable[web.StreamResponse]]


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
        self._runner = await _runner(self._dialects, self._session_of)
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
        runner = await _runner(self._dialects, lambda _: session)
        await web.SockSite(runner, sock).start()
        return runner


async def _runner(dialects: Sequence[Dialect], session_of: _SessionOf) -> web.AppRunner:
    app = web.Application(client_max_size=_REQUEST_BYTES, middlewares=[_in_api_shape(dialects)])
    app.router.add_get("/", _alive)
    for dialect in dialects:
        for route in dialect.calls:
            app.router.add_post(route, _answering(dialect, session_of, _answering_call(route)))
        for route in dialect.counts:
            app.router.add_post(route, _answering(dialect, session_of, _answering_count(route)))
        for route, document in dialect.documents().items():
            app.router.add_get(route, _answering(dialect, session_of, _telling(document)))
    # An agent that hangs up frees the inference server's slot: its handler is cancelled.
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
        max_field_size=_HEADER_BYTES,
    )
    await runner.setup()
    return runner


def _in_api_shape(dialects: Sequence[Dialect]) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}"
            return refuse(_nearest(dialects, request.path), not_served(error.status, message))

    return middleware


def _nearest(dialects: Sequence[Dialect], path: str) -> Dialect:
    """The dialect whose calls have most words of `path` in their addresses."""
    words = set(re.split("[/:]", path))

    def shared(dialect: Dialect) -> int:
        return max(len(words.intersection(re.split("[/:{}|]", route))) for route in dialect.calls)

    return max(dialects, key=shared)


async def _alive(request: web.Request) -> web.Response:
    return web.Response(text="hpcroll\n")


def _answering(dialect: Dialect, session_of: _SessionOf, answer: _Answer) -> _Handler:
    async def handler(http: web.Request) -> web.StreamResponse:
        try:
            session = session_of(http)
            return await session.track(asyncio.ensure_future(answer(dialect, session, http)))
        except Refusal as refusal:
            return refuse(dialect, refusal)

    return handler


def _answering_call(route: str) -> _Answer:
    async def answer(dialect: Dialect, session: GatewaySession, http: web.Request) -> web.StreamResponse:
        call = await _read(http, route)
        caller = _understood(dialect, lambda: dialect.read(call))
        session.admit()
        outlet = Outlet(http, dialect, caller)
        path_model, model = http.match_info.get("model"), session.services.config.name
        purpose = declared_purpose(caller.request, call, path_model=path_model, model=model)
        request = replace(caller.request, purpose=purpose)
        return await Exchange(session, request, dialect.name, outlet).run()

    return answer


def _answering_count(route: str) -> _Answer:
    async def answer(dialect: Dialect, session: GatewaySession, http: web.Request) -> web.StreamResponse:
        call = await _read(http, route)
        request = _understood(dialect, lambda: dialect.read_count(call))
        try:
            return web.json_response(dialect.count(await session.count_tokens(request)))
        except CannotRenderError as error:
            raise bad_request(str(error)) from error

    return answer


def _telling(document: Mapping[str, Any]) -> _Answer:
    async def answer(dialect: Dialect, session: GatewaySession, http: web.Request) -> web.StreamResponse:
        return web.json_response(document)

    return answer


def _understood(dialect: Dialect, read: Callable[[], _Read]) -> _Read:
    """What a dialect reads of a request; a plug-in that fails is an error in its API's shape too."""
    try:
        return read()
    except Refusal:
        raise
    except Exception as error:
        _LOG.exception("dialect failed to read a request dialect=%s", dialect.name)
        raise broken_dialect(dialect.name, error) from error


async def _read(http: web.Request, route: str) -> HttpCall:
    try:
        body = _parse(await http.read())
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    except web.RequestPayloadError as error:
        raise bad_request(f"the body cannot be decoded: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return HttpCall(body, route, http.query, http.headers)


def _parse(text: bytes) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if "hex escape" not in str(error):
            raise
    # JavaScript agents cut texts in the middle of a surrogate pair. No tokenizer knows half a character:
    # as in any UTF-8 encoder, the replacement character stands for it.
    whole = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-16", "surrogatepass")
    return from_json(whole.decode("utf-16", "replace"), allow_inf_nan=False)
