"""The server: the endpoints of inference servers, over the scripts."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from pydantic import ValidationError

from hpcroll.errors import ConfigError
from hpcroll.testing.policy_server.chat import ChatWire
from hpcroll.testing.policy_server.completions import CompletionsWire
from hpcroll.testing.policy_server.delivery import Delivery, instead_of_reply
from hpcroll.testing.policy_server.faults import UNSAMPLED, Fault
from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.qwen3 import Qwen3Template
from hpcroll.testing.policy_server.record import DONE, Record, Sampled
from hpcroll.testing.policy_server.reply import make_reply
from hpcroll.testing.policy_server.script import Script
from hpcroll.testing.policy_server.sessions import Choice, Sessions
from hpcroll.testing.policy_server.sglang_generate import SglangGenerateWire
from hpcroll.testing.policy_server.tekken import TekkenTemplate
from hpcroll.testing.policy_server.template import Template
from hpcroll.testing.policy_server.tokens import Tokens
from hpcroll.testing.policy_server.vllm_generate import VllmGenerateWire
from hpcroll.testing.policy_server.wire import Wire

log = logging.getLogger(__name__)

NOTICE = "scripted by hpcroll.testing.policy_server: replies come from a file, no model runs"
TEMPLATES = ("tekken", "qwen3")
_WIRES: tuple[Wire, ...] = (ChatWire(), CompletionsWire(), VllmGenerateWire(), SglangGenerateWire())
_NONCANONICAL = {"messages": 0.5, "requests": 0.25}
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


class PolicyServer:
    """A scripted policy server on 127.0.0.1, as an async context manager.

    By default it does what real engines do with a conversation: it encodes the text of earlier replies
    again, so that where a reply was tokenised non-canonically the next prompt differs from what was
    sampled. With `remember` it puts the ids that it sampled into the next prompt of the same session
    (template `tekken` only).
    """

    def __init__(
        self,
        scripts: Iterable[Script] = (),
        *,
        seed: int = 0,
        version: int = 0,
        model: str = "policy",
        template: str = "tekken",
        remember: bool = False,
        noncanonical: float | None = None,
        turn_latency_s: float = 0.0,
        token_latency_s: float = 0.0,
        context_tokens: int = 131_072,
        name_version: bool = True,
        incremental: bool = False,
        log_path: Path | None = None,
    ) -> None:
        self._sessions = Sessions(tuple(scripts), seed)
        self._seed = seed
        self._version = version
        self._model = model
        self._template = _load_template(template, remember=remember)
        self._noncanonical = noncanonical
        self._turn_latency_s = turn_latency_s
        self._token_latency_s = token_latency_s
        self._context_tokens = context_tokens
        self._name_version = name_version
        self._incremental = incremental
        self._record = Record(log_path)
        self._faults: list[tuple[Fault, str | None]] = []
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.waiting = 0
        """Requests that wait for their first token now."""
        self.refused = 0
        """Requests that were too long for the context."""

    @property
    def base_url(self) -> str:
        """Without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def sampled(self) -> list[Sampled]:
        """Every reply made so far; with `log_path` they go to that file (JSON lines) instead."""
        return self._record.sampled

    @property
    def tokens(self) -> Tokens:
        """The tokenizer of the template `tekken`."""
        return Tokens.load()

    @property
    def template(self) -> Template:
        return self._template

    @property
    def version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        """From now on replies, also those under way, name this policy version."""
        self._version = version

    def fail(self, fault: Fault, *, session: str | None = None) -> None:
        """The next `fault.times` requests (of `session`, or of any) are struck."""
        self._faults += [(fault, session)] * fault.times

    async def start(self, port: int = 0) -> None:
        """Listens on `port` of 127.0.0.1, 0 for any free one."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        for wire in _WIRES:
            app.router.add_post(wire.path, partial(self._serve, wire))
        app.router.add_post("/scripted/version", self._change_version)
        app.router.add_post("/scripted/fault", self._add_fault)
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

    async def _add_fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        session = body.pop("session", None)
        try:
            self.fail(Fault.model_validate(body), session=session)
        except ValidationError as error:
            return _refuse(str(error))
        return web.json_response({"waiting": len(self._faults)})

    async def _serve(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            session = request.headers.get("X-Session-Id") or str(body.get("user") or "")
            prompt = wire.read_prompt(body, self._template, session=session)
            room = self._context_tokens - len(prompt)
            wanted = wire.read_max_tokens(body, room)
        except _UNREADABLE as error:
            return _refuse(f"the request cannot be read: {type(error).__name__}: {error}")
        if room < (wanted or 1):
            self.refused += 1
            self._sessions.forget_prompts(session)
            message = wire.refuse(context=self._context_tokens, prompt=len(prompt), wanted=wanted or 1)
            return _refuse(message)
        choice = self._sessions.choose(session, prompt, self._template.read_prompt(prompt))
        whole = False
        try:
            response, whole = await self._answer(wire, request, body, session, prompt, choice, wanted or room)
        finally:
            if choice.mark is not None:
                choice.mark.end(whole=whole)
        return response

    async def _answer(
        self,
        wire: Wire,
        request: web.Request,
        body: dict[str, Any],
        session: str,
        prompt: list[int],
        choice: Choice,
        max_tokens: int,
    ) -> tuple[web.StreamResponse, bool]:
        """The response, and whether the whole reply went out."""
        fault = self._take_fault(session) or self._sessions.fault_of(session, choice)
        if fault is not None and fault.kind in UNSAMPLED:
            return instead_of_reply(fault), False
        reply = make_reply(
            choice.turn,
            self._template,
            seed=self._seed,
            identity=choice.identity,
            noncanonical=self._share(choice),
            max_tokens=max_tokens,
        )
        self.waiting += 1
        try:
            await asyncio.sleep(choice.turn.stall_s + self._turn_latency_s)
        finally:
            self.waiting -= 1
        out = Outgoing(
            body=body,
            prompt=prompt,
            reply=reply,
            request_id=f"{wire.name}-{uuid.uuid4().hex}",
            model=self._model,
            vocabulary=self._template.vocabulary,
            strips_newlines=self._template.strips_newlines,
            incremental=self._incremental,
            fault=fault,
            stated_usage=choice.turn.usage or {},
            version=lambda: self._version if self._name_version else None,
        )
        entry = self._record.begin(
            Sampled(
                request_id=out.request_id,
                session=session,
                behaviour=choice.behaviour.name,
                turn=choice.index,
                kind=choice.kind,
                wire=wire.name,
                prompt_ids=tuple(prompt),
                sampled_ids=reply.ids,
                logprobs=reply.logprobs,
                finish_reason=reply.finish_reason,
                version=self._version,
                canonical=reply.canonical,
                version_end=self._version,
                fault=None if fault is None else fault.kind.value,
            )
        )
        self._template.remember(session, prompt, reply.draft, reply.ids)
        delivery = Delivery(
            request,
            wire,
            out,
            entry,
            self._token_latency_s,
            self.set_version,
            lambda: self._version,
            split_characters=choice.turn.bytewise,
        )
        response = await delivery.run(stream=bool(body.get("stream")))
        return response, entry.sampled.ended == DONE

    def _take_fault(self, session: str) -> Fault | None:
        for place, (fault, wanted) in enumerate(self._faults):
            if wanted in (None, session):
                del self._faults[place]
                return fault
        return None

    def _share(self, choice: Choice) -> float:
        if choice.turn.noncanonical is not None:
            return choice.turn.noncanonical
        if choice.behaviour.noncanonical is not None:
            return choice.behaviour.noncanonical
        if self._noncanonical is not None:
            return self._noncanonical
        return _NONCANONICAL[choice.behaviour.count]


def _load_template(name: str, *, remember: bool) -> Template:
    if name == "tekken":
        return TekkenTemplate(remember=remember)
    if name != "qwen3":
        raise ConfigError(f"no template {name!r}: choose one of {', '.join(TEMPLATES)}")
    if remember:
        raise ConfigError("the template qwen3 remembers nothing: send ids to the endpoints that take them")
    return Qwen3Template()


def _refuse(message: str) -> web.Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response({"error": error}, status=400)
