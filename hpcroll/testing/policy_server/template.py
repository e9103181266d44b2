"""What a chat template must do here: messages to ids, a reply to ids, and ids back to what was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from hpcroll.testing.policy_server.vocabulary import Vocabulary


class TemplateError(ValueError):
    """A request holds a message that the template cannot render."""


class PartKind(StrEnum):
    """What a client of a chat endpoint is shown of a part of a reply."""

    MARK = "mark"
    """Nothing: control tokens."""
    REASONING = "reasoning"
    TEXT = "text"
    CALLS = "calls"
    """Tool calls, as names and arguments."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a reply's ids that is encoded apart from the others."""

    kind: PartKind
    ids: tuple[int, ...]
    calls: tuple[int, ...] = ()
    """The places of the tool calls in it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A reply before it is "sampled"."""

    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class PromptView:
    """What the ids of a prompt ask."""

    user_messages: tuple[str, ...]
    """Without the results of tools."""
    last_user: str
    """The last message that is no system message, where it is a user's; else empty."""
    tools: frozenset[str]
    """Names of the tools that are offered."""
    replies: int
    """Assistant messages in it."""


class Template(Protocol):
    """One model family's way to write a conversation as ids."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def strips_newlines(self) -> bool:
        """Whether newlines around thinking and text belong to the template, and are shown to nobody."""

    def render_prompt(self, request: Mapping[str, Any], *, session: str) -> list[int]:
        """The ids of a chat request's tools and messages, up to where the reply begins.

        Raises `TemplateError` for roles and content that it does not know.
        """

    def as_read(self, text: str) -> str:
        """`text` as its ids decode to it again: some tokenizers compose characters first."""

    def render_reply(self, draft: Draft) -> list[Part]:
        """The canonical ids of a reply, end of turn included."""

    def read_prompt(self, ids: Sequence[int]) -> PromptView:
        """What a prompt asks; ids of another template give an empty view."""

    def remember(self, session: str, prompt: Sequence[int], draft: Draft, sampled: Sequence[int]) -> None:
        """Told what was sampled; a template that keeps ids puts them into the session's later prompts."""


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise TemplateError("message content that is not text")


def tool_names(tools: Sequence[Any]) -> frozenset[str]:
    """The names of tools in the shape of the Chat Completions API, or flat."""
    flat = (tool.get("function", tool) for tool in tools if isinstance(tool, dict))
    return frozenset(str(tool["name"]) for tool in flat if isinstance(tool, dict) and "name" in tool)


def read_json(text: str) -> Any:
    """The value in `text`, None where it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None
