"""One call in mode `tokens`: its prompt as ids, and its reply read from them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hpcroll.contract import Ids, Rendering
from hpcroll.gateway.chat import ChatRequest, Delta
from hpcroll.gateway.tokens.conversation import TokenConversation
from hpcroll.gateway.tokens.stream import Finished


class TokenTurn:
    """Render it first; then feed what is sampled, finish, and tell the conversation what was shown."""

    def __init__(self, conversation: TokenConversation, request: ChatRequest, *, call_index: int) -> None:
        self._conversation = conversation
        self._request = request
        self._call_index = call_index
        self._finished: Finished | None = None
        self.prompt_ids: Ids
        """uint32 (P,); there once it is rendered."""
        self.stop_ids = conversation.stop_ids
        """Tokens that end a reply."""
        self.rendering: Rendering | None = None

    async def render(self, *, stop: Sequence[str]) -> None:
        """Raises `CannotRenderError`. In a thread: a long conversation takes tens of milliseconds."""
        request = self._request
        rendered = self._rendered = await asyncio.to_thread(
            self._conversation.prompt, request.messages, request.tools, call_index=self._call_index
        )
        self.prompt_ids = rendered.ids
        self.rendering = Rendering(
            how=rendered.how, from_call=rendered.from_call, why=rendered.why, detail=rendered.detail
        )
        self._stream = self._conversation.stream(rendered, request.tools, stop=stop)

    def feed(self, ids: Sequence[int]) -> Delta:
        """What the next sampled ids show."""
        return self._stream.feed(ids)

    def finish(self) -> Delta:
        """What was not shown of the reply yet, once its last id was fed."""
        self._finished = self._stream.finish()
        return self._finished.delta

    def shown(self) -> None:
        """The agent gets the whole reply: later turns may go on from it."""
        assert self._finished is not None, "finish() comes first"
        self._conversation.reply(self._rendered, self._finished)
