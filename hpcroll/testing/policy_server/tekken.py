"""The chat template over Tekken: brackets of control tokens.

    <s> [tools JSON [/tools]]  then, for each message:
    system     [SYSTEM_PROMPT] text [/SYSTEM_PROMPT]
    user       [INST] text [/INST]
    assistant  text ([TOOL_CALLS] [{"name": ..., "arguments": ...}, ...])? </s>
    tool       [TOOL_RESULTS] text [/TOOL_RESULTS]

Brackets are single control tokens and texts are encoded apart from each other, so that the ids of a
conversation are a prefix of the ids of its continuation wherever the texts encode to what was sampled.
It has no thinking.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from hpcroll.testing.policy_server.template import (
    Draft,
    Part,
    PartKind,
    PromptView,
    TemplateError,
    read_json,
    text_of,
    tool_names,
)
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

_ReplyText = tuple[str, str]
"""A reply's text and its tool calls as text (empty: none)."""


class TekkenTemplate:
    """A `Template`; with `remember`, replies in later prompts are the ids that were sampled."""

    strips_newlines = False

    def __init__(self, *, remember: bool = False) -> None:
        self.vocabulary = Tokens.load()
        self._sampled: dict[tuple[str, bytes, _ReplyText], tuple[int, ...]] | None = {} if remember else None

    def render_prompt(self, request: Mapping[str, Any], *, session: str) -> list[int]:
        ids = [BOS]
        if tools := request.get("tools"):
            ids += [BEGIN_TOOLS, *self.vocabulary.encode(json.dumps(tools)), END_TOOLS]
        for message in request["messages"]:
            role = message.get("role")
            if role == "assistant":
                ids += self._reply_in_prompt(message, session, ids)
            elif role in _BRACKETS:
                begin, end = _BRACKETS[role]
                ids += [begin, *self.vocabulary.encode(text_of(message)), end]
            else:
                raise TemplateError(f"no template for a message of role {role!r}")
        return ids

    def as_read(self, text: str) -> str:
        return text

    def render_reply(self, draft: Draft) -> list[Part]:
        parts = [Part(PartKind.TEXT, tuple(self.vocabulary.encode(draft.text)))]
        if draft.tool_calls:
            calls = tuple(self.vocabulary.encode(_calls_text(draft.tool_calls)))
            places = tuple(range(len(draft.tool_calls)))
            parts += [Part(PartKind.MARK, (TOOL_CALLS,)), Part(PartKind.CALLS, calls, places)]
        return [*parts, Part(PartKind.MARK, (EOS,))]

    def read_prompt(self, ids: Sequence[int]) -> PromptView:
        users = self._between(ids, BEGIN_USER, END_USER)
        tools = self._between(ids, BEGIN_TOOLS, END_TOOLS)
        return PromptView(
            user_messages=tuple(users),
            last_user=users[-1] if users and _ends_with_user(ids) else "",
            tools=tool_names(read_json(tools[0]) or ()) if tools else frozenset(),
            replies=list(ids).count(EOS),
        )

    def remember(self, session: str, prompt: Sequence[int], draft: Draft, sampled: Sequence[int]) -> None:
        if self._sampled is not None:
            reply = (draft.text, _calls_text(draft.tool_calls))
            self._sampled[session, _digest(prompt), reply] = tuple(sampled)

    def _reply_in_prompt(self, message: Mapping[str, Any], session: str, before: Sequence[int]) -> list[int]:
        draft = Draft(text_of(message), "", tuple(message.get("tool_calls") or ()))
        if self._sampled is not None:
            key = (session, _digest(before), (draft.text, _calls_text(draft.tool_calls)))
            if (sampled := self._sampled.get(key)) is not None:
                return list(sampled)
        return [token_id for part in self.render_reply(draft) for token_id in part.ids]

    def _between(self, ids: Sequence[int], begin: int, end: int) -> list[str]:
        found = []
        start = None
        for place, token_id in enumerate(ids):
            if token_id == begin:
                start = place + 1
            elif token_id == end and start is not None:
                found.append(self.vocabulary.decode(ids[start:place]))
                start = None
        return found


def _ends_with_user(ids: Sequence[int]) -> bool:
    ends = (END_USER, END_RESULT, EOS)
    return next((token_id for token_id in reversed(ids) if token_id in ends), None) == END_USER


def _calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        f'{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}'
        for call in calls
    ]
    return f"[{', '.join(parts)}]" if parts else ""


def _digest(ids: Sequence[int]) -> bytes:
    # A digest and not the ids: prompts kept whole would grow with the square of the turns.
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=16).digest()
