"""The agent's side of a call: text as it comes, actions and the end once the call is recorded."""

from __future__ import annotations

from aiohttp import web

from hpcroll.gateway.chat import Delta, Reply
from hpcroll.gateway.dialects.base import Caller, Dialect
from hpcroll.gateway.refusal import Refusal


class AgentGoneError(Exception):
    """The agent closed its connection."""


class Outlet:
    """Sends one reply, whole or streamed."""

    def __init__(self, http: web.Request, dialect: Dialect, caller: Caller) -> None:
        self._http = http
        self._dialect = dialect
        self._caller = caller
        self._stream: web.StreamResponse | None = None
        self._ready: list[bytes] = []
        self._held: list[bytes] = []
        self._holding = False
        self._opened = False

    @property
    def has_begun(self) -> bool:
        """Whether the agent was shown anything."""
        return self._stream is not None

    @property
    def is_fresh(self) -> bool:
        """Whether it was given nothing yet, so that another try of the call may begin with it."""
        return self._stream is None and not self._ready and not self._held

    def forward(self, delta: Delta, prompt_tokens: int) -> None:
        """Takes a piece of a streamed reply.

        From the first tool call on, which an agent may act upon, pieces are held until `finish`.
        """
        self._holding = self._holding or bool(delta.tool_calls)
        pieces = self._held if self._holding else self._ready
        pieces += [self._opening(prompt_tokens), self._caller.delta(delta)]

    async def flush(self) -> None:
        """Sends what is not held; raises `AgentGoneError`."""
        if self._ready:
            await self._write()

    async def finish(self, reply: Reply) -> web.StreamResponse:
        """Sends the rest of a recorded reply; raises `AgentGoneError`."""
        if not self._caller.request.stream:
            return web.json_response(self._caller.whole(reply))
        opening = self._opening(reply.prompt_tokens)
        return await self._write(*self._held, opening, self._caller.closing(reply))

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """Sends `refusal` in the place of what is left of the reply; raises `AgentGoneError`."""
        if self._stream is None and not self._ready:
            return refuse(self._dialect, refusal)
        return await self._write(self._caller.broken(refusal))

    def _opening(self, prompt_tokens: int) -> bytes:
        opened, self._opened = self._opened, True
        return b"" if opened else self._caller.opening(prompt_tokens)

    async def _write(self, *last: bytes) -> web.StreamResponse:
        """Sends what is ready, and `last` with the end of the stream where there is such."""
        events, self._ready = b"".join((*self._ready, *last)), []
        try:
            if self._stream is None:
                stream = web.StreamResponse(headers={"Content-Type": self._caller.content_type})
                await stream.prepare(self._http)
                self._stream = stream
            if last:
                await self._stream.write_eof(events)
            elif events:
                await self._stream.write(events)
        except ConnectionError as error:
            raise AgentGoneError from error
        return self._stream


def refuse(dialect: Dialect, refusal: Refusal) -> web.Response:
    """`refusal` as the whole answer."""
    return web.json_response(dialect.refusal(refusal), status=refusal.status)
