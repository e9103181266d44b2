"""The agent's side of a call: text as it comes, actions and the end once the call is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from hpcroll.gateway.refusal import Refusal
from hpcroll.gateway.reply import is_action, shown
from hpcroll.gateway.request import ChatRequest


class AgentGoneError(Exception):
    """The agent closed its connection."""


class Outlet:
    """Sends one reply, whole or streamed."""

    def __init__(self, http: web.Request, request: ChatRequest, *, model: str) -> None:
        self._http = http
        self._request = request
        self._model = model
        self._stream: web.StreamResponse | None = None
        self._held: list[bytes] = []
        self._holding = False

    async def forward(self, chunk: Mapping[str, Any]) -> None:
        """Sends a chunk on, or holds it: from the first one on that an agent may act upon.

        Raises `AgentGoneError`.
        """
        self._holding = self._holding or is_action(chunk)
        if not chunk.get("choices") and not self._request.include_usage:
            return
        event = b"data: " + json.dumps(self._shown(chunk)).encode() + b"\n\n"
        if self._holding:
            self._held.append(event)
        else:
            await self._write(event)

    async def finish(self, whole: Mapping[str, Any], refusal: Refusal | None) -> web.StreamResponse:
        """Sends the rest of a recorded reply, or `refusal` in its place; raises `AgentGoneError`."""
        if refusal is not None:
            if self._stream is None:
                return refusal.response()
            await self._write(refusal.event())
        elif not self._request.stream:
            return web.json_response(self._shown(whole))
        else:
            for event in self._held:
                await self._write(event)
            await self._write(b"data: [DONE]\n\n")
        assert self._stream is not None
        return self._stream

    def _shown(self, data: Mapping[str, Any]) -> dict[str, Any]:
        return shown(data, model=self._model, with_logprobs=self._request.wants_logprobs)

    async def _write(self, event: bytes) -> None:
        try:
            if self._stream is None:
                self._stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await self._stream.prepare(self._http)
            await self._stream.write(event)
        except ConnectionError as error:
            raise AgentGoneError from error
