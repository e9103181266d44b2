"""A server of our own, over a real socket, for tests of what talks to servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    """The base URL of a server on 127.0.0.1 with these routes."""
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
