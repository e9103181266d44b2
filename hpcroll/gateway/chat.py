"""A model call in the one shape that everything inside the gateway speaks: OpenAI Chat Completions.

Dialects translate an agent's request into a `ChatRequest` and a `Reply` back into the agent's shape; engines
translate a `ChatRequest` into what an inference server takes. Messages and tools are plain dicts as the
Chat Completions API defines them, with `reasoning_content` for what a model thought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcroll.contract import CallPurpose, Sampling, canonical_json, sha256_hex

Message = dict[str, Any]

_THOUGHT_FIELDS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, read and checked."""

    messages: tuple[Message, ...]
    stream: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    asked: Sampling = field(default_factory=Sampling)
    constraints: Mapping[str, Any] = field(default_factory=dict)
    """Fields that constrain sampling (response_format, a forced tool_choice ...), as the server takes them.

    They change the distribution that is sampled from, and no log-probability says so.
    """
    passed_on: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that a server which renders gets untouched (chat_template_kwargs ...)."""
    purpose: CallPurpose = CallPurpose.MAIN

    @property
    def tools_sha256(self) -> str | None:
        return sha256_hex(canonical_json(list(self.tools)).encode()) if self.tools else None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the reply's tool call number `index`; `id` and `name` come whole."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of a streamed reply adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """Entries of `logprobs.content`, as the server gave them."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply, for the agent."""

    message: Message
    """`role`, `content` (str or None), and where there are such `reasoning_content` and `tool_calls`."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop: str | None = None
    """The stop sequence that ended it, where one did and the server says which."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[Mapping[str, Any], ...] = ()

    @property
    def content(self) -> str:
        return self.message.get("content") or ""

    @property
    def reasoning(self) -> str:
        return self.message.get("reasoning_content") or ""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """As the Chat Completions API gives them: `id`, `function.name`, `function.arguments` (text)."""
        return self.message.get("tool_calls") or ()


class MessageBuilder:
    """Puts the deltas of a streamed reply together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            while len(self._calls) <= piece.index:
                self._calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = self._calls[piece.index]
            call["id"] = piece.id or call["id"]
            call["function"]["name"] = piece.name or call["function"]["name"]
            call["function"]["arguments"] += piece.arguments

    def message(self) -> dict[str, Any]:
        """The message so far."""
        return assistant_message("".join(self._content), "".join(self._reasoning), self._calls)


def assistant_message(
    content: str | None, reasoning: str | None = None, tool_calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """An assistant message without empty fields, which clients do not send back."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def thought_of(message: Mapping[str, Any]) -> str:
    """What a message or delta says the model thought, by either name that servers and agents give it."""
    for name in _THOUGHT_FIELDS:
        if thought := message.get(name):
            return str(thought)
    return ""
