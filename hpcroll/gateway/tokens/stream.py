"""A reply while it is sampled: ids in, what the agent may see of them out."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from hpcroll.contract import Ids
from hpcroll.gateway.chat import Delta, Message, ToolCallDelta
from hpcroll.gateway.tokens.renderer import Parsed, TokenRenderer


@dataclass(frozen=True, slots=True)
class Finished:
    """A complete reply."""

    message: Message
    """The assistant message, equal to what all deltas together give."""
    delta: Delta
    """What was not shown yet: the rest of the text, and every tool call."""
    malformed: tuple[str, ...]
    """Why, for each tool call that is shown as text because it cannot be read."""
    ids: list[int]
    """Every sampled id."""
    native_ids: bool
    """The model itself wrote the ids of its tool calls."""


class _Channel(Enum):
    START = auto()
    """Nothing but white space so far."""
    REASONING = auto()
    CONTENT = auto()
    HELD = auto()
    """What follows can only be told at the end: a tool call, or something unforeseen."""


class ReplyStream:
    """Turns sampled ids into deltas. Each id costs a constant, `finish` one pass over the reply.

    Text is shown as soon as nothing that follows can change it: whole characters, without the white space
    that a template strips, up to the first control token other than those of thinking. Tool calls are shown
    at the end, where an agent acts upon them.
    """

    def __init__(
        self,
        renderer: TokenRenderer,
        prompt_ids: Ids,
        tools: Sequence[Any] = (),
        *,
        stop: Iterable[str] = (),
    ) -> None:
        """`stop`: strings that end the reply; not shown, nor is what follows them."""
        self._renderer = renderer
        self._tail = renderer.tail(prompt_ids)
        self._tools = tools
        self._stop = tuple(text for text in stop if text)
        self._stop_ids = frozenset(renderer.stop_ids)
        self._ids: list[int] = []
        self._reasoning = _Text(())
        self._content = _Text(self._stop)
        self._decoder = _decoder()
        self._open = renderer.tokenizer.convert_tokens_to_ids("<think>")
        self._close = renderer.tokenizer.convert_tokens_to_ids("</think>")
        self._pieces = renderer.tokenizer.pieces or []
        self._channel = _Channel.HELD
        if renderer.streams:
            thinking = renderer.parse([], self._tail, tools).thinking
            self._channel = _Channel.REASONING if thinking else _Channel.START

    def feed(self, ids: Sequence[int]) -> Delta:
        """Takes the next ids; returns what they show, possibly nothing."""
        known = len(self._ids)
        self._ids += ids
        pending = bytearray()
        reasoning = content = ""
        for position in range(known, len(self._ids)):
            if self._channel is _Channel.HELD:
                break
            token = self._ids[position]
            if token in self._renderer.tokenizer.control_ids or token in self._stop_ids:
                shown = self._add(bytes(pending), final=True)
                pending.clear()
                reasoning, content = reasoning + shown[0], content + shown[1]
                self._channel = self._after(token, position + 1)
            elif token < len(self._pieces):
                pending += self._pieces[token]
        if pending and self._channel is not _Channel.HELD:
            shown = self._add(bytes(pending))
            reasoning, content = reasoning + shown[0], content + shown[1]
        return Delta(content, reasoning)

    def finish(self) -> Finished:
        """The whole message and what is left to show, once the last id is in."""
        parsed = self._renderer.parse(self._ids, self._tail, self._tools)
        content = parsed.content
        if cuts := [at for text in self._stop if (at := content.find(text)) >= 0]:
            content = content[: min(cuts)].rstrip()
        # What the agent has seen is what the reply was, also where a parser changes its mind.
        shown_reasoning, shown_content = self._reasoning.shown, self._content.shown
        reasoning = parsed.reasoning if parsed.reasoning.startswith(shown_reasoning) else shown_reasoning
        content = content if content.startswith(shown_content) else shown_content
        settled = Parsed(content, reasoning, parsed.tool_calls, parsed.thinking, parsed.malformed)
        message = settled.message([f"call_{secrets.token_hex(12)}" for _ in parsed.tool_calls])
        delta = Delta(
            content[len(shown_content) :],
            reasoning[len(shown_reasoning) :],
            tuple(
                ToolCallDelta(index, call["id"], call["function"]["name"], call["function"]["arguments"])
                for index, call in enumerate(message.get("tool_calls") or ())
            ),
        )
        native = any(call[0] is not None for call in parsed.tool_calls)
        return Finished(message, delta, parsed.malformed, self._ids, native)

    def _add(self, data: bytes, *, final: bool = False) -> tuple[str, str]:
        text = self._decoder.decode(data, final)
        if final:
            self._decoder.reset()
        if self._channel is _Channel.START and text.strip():
            self._channel = _Channel.CONTENT
        if self._channel is _Channel.REASONING:
            return self._reasoning.add(text), ""
        shown = self._content.add(text)
        if self._content.ended:
            self._channel = _Channel.HELD
        return "", shown

    def _after(self, token: int, length: int) -> _Channel:
        """The channel after a control token, where the parser agrees."""
        if token == self._open and self._channel in (_Channel.START, _Channel.REASONING):
            parsed = self._parse(length)
            if parsed.thinking and not parsed.reasoning:
                return _Channel.REASONING
        elif token == self._close and self._channel is _Channel.REASONING:
            parsed = self._parse(length)
            if not parsed.thinking and not parsed.content and parsed.reasoning == self._reasoning.whole:
                return _Channel.CONTENT
        return _Channel.HELD

    def _parse(self, length: int) -> Parsed:
        return self._renderer.parse(self._ids[:length], self._tail, self._tools)


class _Text:
    """Text of one channel, of which white space at either end is never shown."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._behind = max((len(text) for text in stop), default=1) - 1
        self._shown: list[str] = []
        self._pending = ""
        self.ended = False
        """A stop string was found."""

    @property
    def shown(self) -> str:
        return "".join(self._shown)

    @property
    def whole(self) -> str:
        """Everything so far, stripped."""
        return (self.shown + self._pending).strip()

    def add(self, text: str) -> str:
        """What can be shown now."""
        self._pending += text
        if not self._shown:
            self._pending = self._pending.lstrip()
        cuts = [at for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        self.ended = bool(cuts)
        end = min(cuts) if cuts else len(self._pending) - self._behind
        ready = self._pending[: max(end, 0)].rstrip()
        self._pending = self._pending[len(ready) :]
        if ready:
            self._shown.append(ready)
        return ready


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
