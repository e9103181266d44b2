"""The addresses of the gateway: each dialect's calls, counts and documents, for the session of a request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from pydantic_core import from_json

from hpcroll.gateway.dialects.base import Dialect, HttpCall
from hpcroll.gateway.exchange import Exchange
from hpcroll.gateway.outlet import Outlet, refuse
from hpcroll.gateway.purpose import declared_purpose
from hpcroll.gateway.refusal import Refusal, bad_request, broken_dialect, not_served
from hpcroll.gateway.session import GatewaySession
from hpcroll.gateway.tokens import CannotRenderError

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

_REQUEST_BYTES = 1 << 28
_HEADER_BYTES = 1 << 16
"""Agents put what they know of a turn into one header."""
_SHUTDOWN_S = 0.5
_LOG = logging.getLogger(__name__)

SessionOf = Callable[[web.Request], GatewaySession]
"""The session that a request belongs to; raises `Refusal` where there is none."""
_Read = TypeVar("_Read")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Answer = Callable[[Dialect, GatewaySession, web.Request], Awaitable[web.StreamResponse]]


async def open_routes(dialects: Sequence[Dialect], session_of: SessionOf) -> web.AppRunner:
    """All addresses, ready for a site."""
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


def _answering(dialect: Dialect, session_of: SessionOf, answer: _Answer) -> _Handler:
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
