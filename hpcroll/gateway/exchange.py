"""One model call from the agent's request to the agent's reply, with its record in between."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import aiohttp
from aiohttp import web
from pydantic_core import from_json

from hpcroll.contract import Call, Latency, LogprobKind, PolicyId, RecordedCall, StopReason
from hpcroll.errors import ModelError, SpoolError
from hpcroll.gateway.admission import CallCutError
from hpcroll.gateway.attribution import served_by
from hpcroll.gateway.chat import ChatRequest, Delta
from hpcroll.gateway.engines import engine_of
from hpcroll.gateway.engines.base import Part, Question, Reading
from hpcroll.gateway.outlet import AgentGoneError, Outlet
from hpcroll.gateway.overflow import is_overflow, read_lengths
from hpcroll.gateway.refusal import Lengths, Refusal, bad_request, not_recorded, upstream_failed
from hpcroll.gateway.reply import ReplyReader
from hpcroll.gateway.sampling import force_sampling
from hpcroll.gateway.session import GatewaySession
from hpcroll.gateway.sse import events
from hpcroll.gateway.tokens import CannotRenderError, TokenTurn
from hpcroll.gateway.upstream import Accepted, Upstream, UpstreamRefusal

_AGENT_GONE = "the agent went away before the reply was complete"


class Exchange:
    """The state of one call under way; whatever is sent to an inference server is recorded."""

    def __init__(self, session: GatewaySession, request: ChatRequest, dialect: str, outlet: Outlet) -> None:
        self._session = session
        self._config = session.services.config
        self._asked = request
        request = replace(request, messages=session.recall.restore(request.messages, request.tools))
        self._request = request
        self._dialect = dialect
        self._outlet = outlet
        self._ticket = session.begin(request)
        self._sampling = force_sampling(
            request.asked,
            self._config,
            budget=self._ticket.budget,
            identity=f"{session.name}.{self._ticket.call_index}",
        )
        self._policy_before = self._policy_after = session.services.policy.known()
        self._started_at = time.time()
        self._started = time.monotonic()
        self._tools_sha256: str | None = None
        self._first_token_s: float | None = None
        self._accepted: Accepted | None = None
        self._reply = ReplyReader(LogprobKind(self._config.logprobs))
        self._turn = session.token_turn(request, self._ticket)
        """In mode `tokens`."""

    async def run(self) -> web.StreamResponse:
        """Returns the response, sent or to be sent, once the call is recorded.

        An agent that goes away ends the call: it is recorded with what came so far.
        """
        try:
            try:
                refusal = await self._try()
            except CallCutError as cut:
                if self._outlet.is_fresh:
                    return await self._try_again(cut)
                refusal = self._fail(ModelError(str(cut)))
            refusal = await self._record(refusal)
            if refusal is not None:
                return await self._outlet.refuse(refusal)
            if self._turn is not None:
                self._turn.shown()
            return await self._outlet.finish(self._reply.reply())
        except AgentGoneError:
            # The connection is closed; what is returned goes nowhere.
            return web.Response(status=499)

    async def _try(self) -> Refusal | None:
        try:
            async with self._session.services.admission.call():
                self._policy_before = self._policy_after = self._session.services.policy.known()
                async with asyncio.timeout(self._config.call_timeout_s):
                    await self._obtain()
                await self._look_at_policy()
        except Refusal as refusal:
            return refusal
        except UpstreamRefusal as refusal:
            return self._translate(refusal)
        except TimeoutError:
            return self._fail(ModelError(f"a model call took over {self._config.call_timeout_s:g} s"))
        except ModelError as error:
            return self._fail(error)
        except (asyncio.CancelledError, AgentGoneError):
            await self._session.record(self._recorded(_AGENT_GONE), self._ticket)
            raise
        return None

    async def _try_again(self, cut: CallCutError) -> web.StreamResponse:
        """Sends a call again that was cut before the agent was shown anything; the cut try is recorded."""
        try:
            await self._session.record(self._recorded(str(cut)), self._ticket)
        except SpoolError:
            return await self._outlet.refuse(not_recorded())
        return await Exchange(self._session, self._asked, self._dialect, self._outlet).run()

    async def _look_at_policy(self) -> None:
        # An engine that names its version is believed; what a silent one may have served is read anew.
        if not self._reply.versions and (self._accepted is None or self._accepted.upstream.version is None):
            self._policy_after = await self._session.services.policy.read() or self._policy_after

    async def _record(self, refusal: Refusal | None) -> Refusal | None:
        # Before the agent sees the reply: whatever it does next, the tokens that made it do so are kept.
        error = refusal.message if refusal is not None else None
        try:
            await self._session.record(self._recorded(error), self._ticket)
        except SpoolError:
            return not_recorded()
        if refusal is None:
            self._session.error = None
        return refusal

    async def _render(self, turn: TokenTurn) -> None:
        try:
            await turn.render(stop=self._sampling.stop or ())
        except CannotRenderError as error:
            raise bad_request(str(error)) from error
        self._reply.expect(turn.prompt_ids)
        found, longest = len(turn.prompt_ids), self._config.context_tokens
        if found >= longest:
            message = f"the prompt is {found} tokens long; the maximum context length is {longest} tokens"
            self._session.refuse(StopReason.CONTEXT_LIMIT, message, Lengths(longest, found))
        room = min(self._sampling.max_tokens or longest, longest - found)
        self._sampling = self._sampling.model_copy(update={"max_tokens": room})

    async def _obtain(self) -> None:
        if self._turn is not None:
            await self._render(self._turn)
        accepted = self._accepted = await self._send()
        # While the server is busy with the prompt.
        self._tools_sha256 = self._request.tools_sha256
        where = accepted.upstream.base_url
        engine = engine_of(accepted.upstream.kind, self._config)
        reading = engine.reading(stream=self._request.stream)
        try:
            self._reply.take_headers(accepted.response.headers)
            if self._request.stream:
                await self._read_stream(accepted, reading)
            else:
                self._take(reading.take(from_json(await accepted.response.read())))
        except aiohttp.ClientError as error:
            raise ModelError(f"{where} broke off its reply: {type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"the reply of {where} cannot be read: {type(error).__name__}: {error}"
            ) from error
        finally:
            accepted.release()
        self._reply.check(where)
        if self._turn is not None:
            self._show(self._turn.finish())
        usage = self._reply.usage()
        length, longest = usage.prompt_counted + usage.completion_counted, self._config.context_tokens
        if length > longest:
            message = f"this call is {length} tokens long; the maximum context length is {longest} tokens"
            self._session.refuse(StopReason.CONTEXT_LIMIT, message, Lengths(longest, length))

    async def _send(self) -> Accepted:
        try:
            return await self._send_once()
        except UpstreamRefusal as refusal:
            lengths = read_lengths(refusal) if is_overflow(refusal) else None
            if lengths is None:
                raise
            room = min(lengths.longest, self._config.context_tokens) - lengths.found
            if not 1 <= room < (self._sampling.max_tokens or 0):
                raise
            # The prompt fits, the reply's bound did not: servers refuse that instead of lowering it.
            self._sampling = self._sampling.model_copy(update={"max_tokens": room})
            return await self._send_once()

    async def _send_once(self) -> Accepted:
        question = Question(self._request, self._sampling)
        if self._turn is not None:
            question = replace(question, prompt_ids=self._turn.prompt_ids, stop_ids=self._turn.stop_ids)

        def ask(upstream: Upstream) -> tuple[str, bytes]:
            engine = engine_of(upstream.kind, self._config)
            name = upstream.served_name or self._config.served_name or self._config.name
            return engine.path, engine.body(question, model=name)

        return await self._session.services.pool.send(ask, session=self._session.name)

    async def _read_stream(self, accepted: Accepted, reading: Reading) -> None:
        async for batch in events(accepted.response.content.iter_any()):
            for data in batch:
                if data == b"[DONE]":
                    return
                piece = from_json(data)
                if error := piece.get("error"):
                    raise ModelError(f"{accepted.upstream.base_url} broke off its reply: {error}")
                self._take(reading.take(piece))
            # What came together goes on together: the busier the gateway, the fewer its writes.
            await self._outlet.flush()

    def _take(self, part: Part) -> None:
        if self._first_token_s is None and len(part.ids):
            self._first_token_s = time.monotonic() - self._started
        self._reply.take(part)
        if self._turn is not None:
            self._show(self._turn.feed(part.ids))
        elif part.delta:
            self._outlet.forward(part.delta, self._reply.prompt_tokens)

    def _show(self, delta: Delta) -> None:
        self._reply.show(delta)
        if delta and self._request.stream:
            self._outlet.forward(delta, self._reply.prompt_tokens)

    def _translate(self, refusal: UpstreamRefusal) -> Refusal:
        if is_overflow(refusal):
            try:
                self._session.refuse(StopReason.CONTEXT_LIMIT, refusal.message, read_lengths(refusal))
            except Refusal as limit:
                return limit
        if refusal.status in (400, 413, 422):
            return bad_request(refusal.message)
        return self._fail(ModelError(str(refusal)))

    def _fail(self, error: ModelError) -> Refusal:
        self._session.error = error
        return upstream_failed(str(error))

    def _recorded(self, error: str | None) -> RecordedCall:
        accepted, reply, request = self._accepted, self._reply, self._request
        streamed = accepted is not None and request.stream
        call = Call(
            call_index=self._ticket.call_index,
            rollout_id=self._session.rollout_id,
            attempt=self._session.attempt,
            dialect=self._dialect,
            model_name=self._config.name,
            endpoint=accepted.upstream.base_url if accepted is not None else "",
            started_at=self._started_at,
            latency=Latency(
                queue_s=accepted.accepted_at - self._started if accepted is not None and streamed else None,
                first_token_s=self._first_token_s,
                total_s=time.monotonic() - self._started,
            ),
            sampling_asked=request.asked,
            sampling_effective=self._sampling,
            constraints=tuple(sorted(request.constraints)),
            finish_reason=reply.finish_reason,
            usage=reply.usage(),
            logprob_kind=reply.logprob_kind,
            policy=self._policy(),
            version_spans=reply.version_spans,
            rendering=self._turn.rendering if self._turn is not None else None,
            purpose=request.purpose,
            messages_base=self._ticket.messages.base,
            messages_from=self._ticket.messages.keep,
            messages=self._ticket.messages.new,
            reply=reply.message if error is None else None,
            tools_sha256=self._tools_sha256 or request.tools_sha256,
            error=error,
        )
        return RecordedCall(call, reply.tokens())

    def _policy(self) -> PolicyId | None:
        return served_by(
            self._policy_before,
            self._policy_after,
            name=self._config.name,
            named=self._reply.versions,
            fixed=self._accepted.upstream.version if self._accepted is not None else None,
            history=self._session.services.policy.history(),
        )
