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
        return self._stream is None and not self._held

    async def forward(self, delta: Delta, prompt_tokens: int) -> None:
        """Sends a piece on, or holds it: from the first tool call on, which an agent may act upon.

        Raises `AgentGoneError`.
        """
        self._holding = self._holding or bool(delta.tool_calls)
        self._held += [self._opening(prompt_tokens), self._caller.delta(delta)]
        if not self._holding:
            await self._write_held()

    async def finish(self, reply: Reply) -> web.StreamResponse:
        """Sends the rest of a recorded reply; raises `AgentGoneError`."""
        if not self._caller.request.stream:
            return web.json_response(self._caller.whole(reply))
        self._held += [self._opening(reply.prompt_tokens), self._caller.closing(reply)]
        return await self._write_held()

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """Sends `refusal` in the place of what is left of the reply; raises `AgentGoneError`."""
        if self._stream is None:
            return refuse(self._dialect, refusal)
        self._held = [self._caller.broken(refusal)]
        return await self._write_held()

    def _opening(self, prompt_tokens: int) -> bytes:
        opened, self._opened = self._opened, True
        return b"" if opened else self._caller.opening(prompt_tokens)

    async def _write_held(self) -> web.StreamResponse:
        events, self._held = b"".join(self._held), []
        try:
            if self._stream is None:
                stream = web.StreamResponse(headers={"Content-Type": self._caller.content_type})
                await stream.prepare(self._http)
                self._stream = stream
            if events:
                await self._stream.write(events)
        except ConnectionError as error:
            raise AgentGoneError from error
        return self._stream


def refuse(dialect: Dialect, refusal: Refusal) -> web.Response:
    """`refusal` as the whole answer."""
    return web.json_response(dialect.refusal(refusal), status=refusal.status)
