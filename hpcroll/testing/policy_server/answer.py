"""A reply in OpenAI's shape, whole or streamed, with token ids as vLLM returns them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from hpcroll.testing.policy_server.reply import Reply, logprob_content, stream_parts
from hpcroll.testing.policy_server.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply on its way out."""

    body: dict[str, Any]
    prompt: list[int]
    reply: Reply
    request_id: str
    model: str
    tokens: Tokens
    token_latency_s: float
    version: Callable[[], int | None]
    """The policy version now; None where the server keeps it to itself."""

    async def whole(self) -> web.Response:
        """The reply in one piece."""
        headers = self._headers()
        await asyncio.sleep(self.token_latency_s * len(self.reply.ids))
        choice = {
            "index": 0,
            "message": self.reply.message(),
            "finish_reason": self.reply.finish_reason,
            **self._tokens_of(0, len(self.reply.ids)),
        }
        data = {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": self._usage(),
            **self._prompt_ids(),
        }
        return web.json_response(data, headers=headers)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The reply as server-sent events, sent to their end."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self._headers()})
        await response.prepare(request)
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await self._send(response, {"choices": [opening], **self._prompt_ids()})
        for delta, start, stop in stream_parts(self.reply, self.tokens):
            await asyncio.sleep(self.token_latency_s * (stop - start))
            choice = {"index": 0, "delta": delta, "finish_reason": None, **self._tokens_of(start, stop)}
            await self._send(response, {"choices": [choice]})
        closing = {"index": 0, "delta": {}, "finish_reason": self.reply.finish_reason}
        await self._send(response, {"choices": [closing]})
        if (self.body.get("stream_options") or {}).get("include_usage"):
            await self._send(response, {"choices": [], "usage": self._usage()})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, fields: dict[str, Any]) -> None:
        data = {**self._head("chat.completion.chunk"), **fields}
        await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _head(self, kind: str) -> dict[str, Any]:
        # As SGLang names it; a stream that a weight update falls into names both versions.
        version = self.version()
        return {
            "id": self.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            **({} if version is None else {"weight_version": str(version)}),
        }

    def _headers(self) -> dict[str, str]:
        version = self.version()
        return {"X-Scripted": "true", **({} if version is None else {"X-Policy-Version": str(version)})}

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt), len(self.reply.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self.prompt} if self.body.get("return_token_ids") else {}

    def _tokens_of(self, start: int, stop: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.get("return_token_ids"):
            fields["token_ids"] = list(self.reply.ids[start:stop])
        if self.body.get("logprobs"):
            content = logprob_content(self.reply, self.tokens, start, stop)
            fields["logprobs"] = {"content": content}
        return fields
