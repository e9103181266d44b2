"""The chat template: messages to ids, and a reply to ids.

    <s> [tools JSON [/tools]]  then, for each message:
    system     [SYSTEM_PROMPT] text [/SYSTEM_PROMPT]
    user       [INST] text [/INST]
    assistant  text ([TOOL_CALLS] [{"name": ..., "arguments": ...}, ...])? </s>
    tool       [TOOL_RESULTS] text [/TOOL_RESULTS]

Brackets are single control tokens and texts are encoded apart from each other, so that the ids of a
conversation are a prefix of the ids of its continuation wherever the texts encode to what was sampled.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from hpcroll.testing.policy_server.tokens import (
    BEGIN_RESULT,
    BEGIN_SYSTEM,
    BEGIN_TOOLS,
    BEGIN_USER,
    BOS,
    END_RESULT,
    END_SYSTEM,
    END_TOOLS,
    END_USER,
    EOS,
    TOOL_CALLS,
    Tokens,
)

_BRACKETS = {
    "system": (BEGIN_SYSTEM, END_SYSTEM),
    "developer": (BEGIN_SYSTEM, END_SYSTEM),
    "user": (BEGIN_USER, END_USER),
    "tool": (BEGIN_RESULT, END_RESULT),
}

ReplyText = tuple[str, str]
"""A reply's text and its tool calls as text (empty: none)."""


class TemplateError(ValueError):
    """A request holds a message that the template cannot render."""


class Memory:
    """What was sampled after which prompt in which session, by the reply's text."""

    def __init__(self) -> None:
        self._sampled: dict[tuple[str, bytes, ReplyText], tuple[int, ...]] = {}

    def remember(self, session: str, prompt: Sequence[int], reply: ReplyText, sampled: Sequence[int]) -> None:
        self._sampled[session, _digest(prompt), reply] = tuple(sampled)

    def recall(self, session: str, prompt: Sequence[int], reply: ReplyText) -> tuple[int, ...] | None:
        return self._sampled.get((session, _digest(prompt), reply))


def render_prompt(
    request: Mapping[str, Any], tokens: Tokens, *, session: str, memory: Memory | None
) -> list[int]:
    """The ids of a request's tools and messages; with `memory`, replies are the ids that were sampled.

    Raises `TemplateError` for roles and content that it does not know.
    """
    ids = [BOS]
    if tools := request.get("tools"):
        ids += [BEGIN_TOOLS, *tokens.encode(json.dumps(tools)), END_TOOLS]
    for message in request["messages"]:
        role = message.get("role")
        if role == "assistant":
            reply = (text_of(message), calls_text(message.get("tool_calls") or ()))
            sampled = memory.recall(session, ids, reply) if memory is not None else None
            ids += sampled if sampled is not None else render_reply(reply, tokens)
        elif role in _BRACKETS:
            begin, end = _BRACKETS[role]
            ids += [begin, *tokens.encode(text_of(message)), end]
        else:
            raise TemplateError(f"no template for a message of role {role!r}")
    return ids


def render_reply(reply: ReplyText, tokens: Tokens) -> list[int]:
    """The canonical ids of a reply, end of sequence included."""
    text, calls = reply
    return [*tokens.encode(text), *([TOOL_CALLS, *tokens.encode(calls)] if calls else []), EOS]


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Tool calls of an assistant message as the template writes them; their ids are left out."""
    parts = [
        f'{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}'
        for call in calls
    ]
    return f"[{', '.join(parts)}]" if parts else ""


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise TemplateError("message content that is not text")


def _digest(ids: Sequence[int]) -> bytes:
    # A digest and not the ids: prompts kept whole would grow with the square of the turns.
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=16).digest()
