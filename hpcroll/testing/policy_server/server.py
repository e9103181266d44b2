"""The server: OpenAI Chat Completions with token ids, log-probabilities and a policy version."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from hpcroll.testing.policy_server.answer import Answer
from hpcroll.testing.policy_server.reply import make_reply
from hpcroll.testing.policy_server.script import Script, find_script
from hpcroll.testing.policy_server.template import Memory, TemplateError, render_prompt, text_of
from hpcroll.testing.policy_server.tokens import Tokens

log = logging.getLogger(__name__)

NOTICE = "scripted by hpcroll.testing.policy_server: replies come from a file, no model runs"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One reply as the server made it: what a record of it must equal, id for id."""

    request_id: str
    session: str
    behaviour: str
    turn: int
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: int
    """Policy version when the reply began."""
    canonical: bool


class PolicyServer:
    """A scripted policy server on 127.0.0.1, as an async context manager.

    By default it does what real engines do with a conversation: it encodes the text of earlier replies
    again, so that where a reply was tokenised non-canonically the next prompt differs from what was
    sampled. With `remember` it puts the ids that it sampled into the next prompt of the same session.
    """

    def __init__(
        self,
        scripts: Iterable[Script] = (),
        *,
        seed: int = 0,
        version: int = 0,
        model: str = "policy",
        remember: bool = False,
        noncanonical: float = 0.5,
        turn_latency_s: float = 0.0,
        token_latency_s: float = 0.0,
        context_tokens: int = 131_072,
        name_version: bool = True,
        log_path: Path | None = None,
    ) -> None:
        self._scripts = tuple(scripts)
        self._seed = seed
        self._version = version
        self._model = model
        self._memory = Memory() if remember else None
        self._noncanonical = noncanonical
        self._turn_latency_s = turn_latency_s
        self._token_latency_s = token_latency_s
        self._context_tokens = context_tokens
        self._name_version = name_version
        self._log_path = log_path
        self._runner: web.AppRunner | None = None
        self._tokens = Tokens.load()
        self.port = 0
        self.waiting = 0
        """Requests that wait for their first token now."""
        self.sampled: list[Sampled] = []
        """Every reply made so far; with `log_path` they go to that file (JSON lines) instead."""

    @property
    def base_url(self) -> str:
        """Without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def tokens(self) -> Tokens:
        return self._tokens

    @property
    def version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        """From now on replies, also those under way, name this policy version."""
        self._version = version

    async def start(self, port: int = 0) -> None:
        """Listens on `port` of 127.0.0.1, 0 for any free one."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/scripted/version", self._change_version)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        log.warning("policy server at %s is %s", self.base_url, NOTICE)

    async def stop(self) -> None:
        """Stops listening and drops what is under way."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "notice": NOTICE})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "owned_by": "scripted",
            "max_model_len": self._context_tokens,
            "notice": NOTICE,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _change_version(self, request: web.Request) -> web.Response:
        self.set_version(int((await request.json())["version"]))
        return web.json_response({"version": self._version})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            messages = body["messages"]
            session = request.headers.get("X-Session-Id") or str(body.get("user") or "")
            prompt = render_prompt(body, self._tokens, session=session, memory=self._memory)
            first = next((text_of(message) for message in messages if message["role"] == "user"), "")
        except (ValueError, KeyError, TypeError, AttributeError, TemplateError) as error:
            return _refuse(f"the request cannot be read: {type(error).__name__}: {error}")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        room = self._context_tokens - len(prompt)
        if room < (wanted or 1):
            return _refuse(
                f"This model's maximum context length is {self._context_tokens} tokens. However, you "
                f"requested {len(prompt) + (wanted or 1)} tokens ({len(prompt)} in the messages, "
                f"{wanted or 1} in the completion). Please reduce the length of the messages or completion."
            )
        return await self._answer(request, body, first, session, prompt, wanted or room)

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        first: str,
        session: str,
        prompt: list[int],
        max_tokens: int,
    ) -> web.StreamResponse:
        # Attempts of one rollout play one behaviour; the gateway names a session ROLLOUT.ATTEMPT.
        behaviour = find_script(self._scripts, first).choose(
            session.rpartition(".")[0] or session, self._seed
        )
        turn_index = sum(message["role"] == "assistant" for message in body["messages"])
        turn = behaviour.turn(turn_index)
        reply = make_reply(
            turn,
            self._tokens,
            seed=self._seed,
            identity=(session, str(turn_index)),
            noncanonical=self._noncanonical,
            max_tokens=max_tokens,
        )
        self.waiting += 1
        try:
            await asyncio.sleep(turn.stall_s + self._turn_latency_s)
        finally:
            self.waiting -= 1
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._keep(
            Sampled(
                request_id=request_id,
                session=session,
                behaviour=behaviour.name,
                turn=turn_index,
                prompt_ids=tuple(prompt),
                sampled_ids=reply.ids,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                version=self._version,
                canonical=reply.canonical,
            )
        )
        if self._memory is not None:
            self._memory.remember(session, prompt, reply.reply_text, reply.ids)
        answer = Answer(
            body=body,
            prompt=prompt,
            reply=reply,
            request_id=request_id,
            model=self._model,
            tokens=self._tokens,
            token_latency_s=self._token_latency_s,
            version=lambda: self._version if self._name_version else None,
        )
        return await (answer.stream(request) if body.get("stream") else answer.whole())

    def _keep(self, sampled: Sampled) -> None:
        # Before the reply leaves: whatever a client recorded is in this log.
        if self._log_path is None:
            self.sampled.append(sampled)
            return
        with self._log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sampled)) + "\n")


def _refuse(message: str) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response({"error": error}, status=400)
