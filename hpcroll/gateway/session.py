"""One attempt's model: its limits, its record, and the calls in flight."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web
from pydantic_core import to_json

from hpcroll.config import ModelConfig
from hpcroll.contract import RecordedCall, Rollout, StopReason
from hpcroll.errors import HpcrollError, SpoolError
from hpcroll.gateway.admission import Admission
from hpcroll.gateway.attribution import PolicySource
from hpcroll.gateway.endpoint import ModelEndpoint
from hpcroll.gateway.journal import Journal
from hpcroll.gateway.prefix import MessageDelta, MessageFolder
from hpcroll.gateway.recall import Recall
from hpcroll.gateway.refusal import Lengths, limit_reached
from hpcroll.gateway.tokens import TokenConversation, TokenRenderer, TokenTurn
from hpcroll.gateway.upstream import UpstreamPool

if TYPE_CHECKING:
    from hpcroll.gateway.chat import ChatRequest

_BYTES_PER_TOKEN = 4.0
"""Of English text and code, until a call of the session tells."""

ANY_KEY = "hpcroll"
"""What an agent inside a sandbox sends as key: nobody else can reach its endpoint."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every session of a gateway shares."""

    config: ModelConfig
    journal: Journal
    pool: UpstreamPool
    policy: PolicySource
    admission: Admission
    renderer: TokenRenderer | None
    """In mode `tokens`."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call that has begun."""

    call_index: int
    messages: MessageDelta
    budget: int
    """Most tokens that it may sample."""
    request: ChatRequest


class GatewaySession:
    """The model as one attempt of one rollout sees it, and everything that it said."""

    def __init__(
        self,
        services: Services,
        rollout: Rollout,
        attempt: int,
        *,
        outside: ModelEndpoint,
        max_calls: int | None,
        serve: Callable[[GatewaySession, socket.socket], Awaitable[web.AppRunner]],
        closed: Callable[[], object],
    ) -> None:
        self.services = services
        self.rollout_id = rollout.rollout_id
        self.attempt = attempt
        self.outside = outside
        """For agents on this node; the key is this session's alone."""
        self.limit: StopReason | None = None
        """The limit that refused a call; an agent that shortens its context and goes on clears that one."""
        self.error: HpcrollError | None = None
        """Why the latest call gave no reply (`ModelError`, or `SpoolError`: not journalled), else None."""
        self._max_calls = max_calls
        self._serve = serve
        self._closed = closed
        self._calls: list[RecordedCall] = []
        self._begun = 0
        self._sampled_tokens = 0
        self._replies = 0
        self._context: tuple[int, int] | None = None
        """The latest call that was answered, and the tokens of its prompt and reply."""
        self._measured: tuple[ChatRequest, int] | None = None
        """The latest request that was answered, and its prompt's tokens."""
        self._messages = MessageFolder()
        renderer = services.renderer
        self._conversation = None if renderer is None else TokenConversation(renderer)
        self.recall = Recall()
        """What tool calls the agent was shown."""
        self._in_flight: set[asyncio.Task[web.StreamResponse]] = set()
        self._writes: set[asyncio.Future[None]] = set()
        self._inside: list[web.AppRunner] = []

    @property
    def name(self) -> str:
        """`<rollout_id>.<attempt>`, as inference servers see it in `X-Session-Id`."""
        return f"{self.rollout_id}.{self.attempt}"

    @property
    def calls(self) -> list[RecordedCall]:
        """Every call that has ended, in order of their start; all of them durable or about to be."""
        return sorted(self._calls, key=lambda recorded: recorded.call.call_index)

    async def serve_inside(self, sock: socket.socket) -> ModelEndpoint:
        """Serves this session alone on a listening socket, which it then owns.

        The socket comes out of a sandbox's network namespace, so any key is accepted.
        """
        port = sock.getsockname()[1]
        runner = await self._serve(self, sock)
        self._inside.append(runner)
        return replace(self.outside, base_url=f"http://127.0.0.1:{port}/v1", api_key=ANY_KEY)

    async def close(self) -> None:
        """Ends the calls in flight, which are recorded as such, waits for their writes, and stops serving;
        idempotent."""
        self._closed()
        for task in self._in_flight:
            task.cancel()
        if self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._writes:
            await asyncio.wait(self._writes)
        while self._inside:
            await self._inside.pop().cleanup()
        self.services.pool.forget(self.name)
        self.services.journal.forget(self.rollout_id, self.attempt)

    def admit(self) -> None:
        """Raises `Refusal` and sets `limit` where the rollout may make no further call."""
        config = self.services.config
        if self._sampled_tokens >= config.rollout_tokens:
            message = f"this rollout has sampled {self._sampled_tokens} tokens, its limit"
            self.refuse(StopReason.TOKEN_LIMIT, message)
        if self._max_calls is not None and self._replies >= self._max_calls:
            self.refuse(
                StopReason.TURN_LIMIT, f"this rollout has made {self._replies} model calls, its limit"
            )

    def refuse(self, limit: StopReason, message: str, lengths: Lengths | None = None) -> NoReturn:
        """Sets `limit` and raises its `Refusal`."""
        self.limit = limit
        raise limit_reached(limit, message, lengths)

    def begin(self, request: ChatRequest) -> Ticket:
        """Numbers a call and decides how much it may sample."""
        config = self.services.config
        call_index, self._begun = self._begun, self._begun + 1
        delta = self._messages.fold(call_index, request.messages)
        # A prompt that goes on from the latest reply is about as long as everything up to it: asking for
        # no more than the rest of the context lets the server accept a call near its limit.
        latest, tokens = self._context or (None, 0)
        context = tokens if delta.is_next and delta.base == latest else 0
        budget = min(config.rollout_tokens - self._sampled_tokens, config.context_tokens - context)
        return Ticket(call_index, delta, max(budget, 1), request)

    def token_turn(self, request: ChatRequest, ticket: Ticket) -> TokenTurn | None:
        """The call in mode `tokens`; None in mode `chat`."""
        if self._conversation is None:
            return None
        return TokenTurn(self._conversation, request, call_index=ticket.call_index)

    async def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the prompt of `request` has; about, by the session's calls, in mode `chat`."""
        if self._conversation is not None:
            messages = self.recall.restore(request.messages, request.tools)
            return await asyncio.to_thread(self._conversation.count, messages, request.tools)
        bytes_per_token = _BYTES_PER_TOKEN
        if self._measured is not None:
            measured, tokens = self._measured
            bytes_per_token = max(_size(measured) / tokens, 0.1)
        return max(round(_size(request) / bytes_per_token), 1)

    async def record(self, recorded: RecordedCall, ticket: Ticket) -> None:
        """Returns once the call is durable; it is in `calls` before the first await.

        Raises `SpoolError` where it could not be written; then it is not in `calls`.
        """
        try:
            recorded = self.services.journal.fold(recorded)
            written = asyncio.wrap_future(self.services.journal.submit(recorded))
            self._writes.add(written)
            written.add_done_callback(self._writes.discard)
            self._take(recorded, ticket)
            await asyncio.shield(written)
        except SpoolError as error:
            self._calls = [call for call in self._calls if call is not recorded]
            self.error = error
            raise

    def _take(self, recorded: RecordedCall, ticket: Ticket) -> None:
        self._calls.append(recorded)
        sampled = len(recorded.tokens.sampled_ids)
        self._sampled_tokens += sampled
        if recorded.call.error is not None:
            return
        self._replies += 1
        prompt = recorded.tokens.prompt_length
        self._context = (ticket.call_index, prompt + sampled)
        self._measured = (ticket.request, prompt)
        self._messages.reply(ticket.call_index, recorded.call.reply)
        self.recall.note(recorded.call.reply)
        if self.limit is StopReason.CONTEXT_LIMIT:
            self.limit = None

    async def track(self, task: asyncio.Task[web.StreamResponse]) -> web.StreamResponse:
        """Awaits a call so that `close` can end it."""
        self._in_flight.add(task)
        try:
            return await task
        finally:
            self._in_flight.discard(task)


def _size(request: ChatRequest) -> int:
    """Bytes of a prompt as JSON."""
    return len(to_json([request.messages, request.tools]))
