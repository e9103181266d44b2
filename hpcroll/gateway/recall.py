"""Tool calls as they were sampled, for agents whose API carries arguments as objects.

An agent that parses the arguments and sends the object back lets the gateway write them anew: other spaces,
other escapes, other ids in the next prompt than were sampled. Where the object is the one that was shown,
the sampled text stands for it. Defaults that the tool's own schema declares count as shown: some agents fill
them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcroll.gateway.arguments import (
    TEXT_ARGUMENT,
    arguments_object,
    same_json,
    takes_text,
    text_argument,
    with_defaults,
)
from hpcroll.gateway.chat import Message


class Recall:
    """What one session's agent was shown, by tool call id."""

    def __init__(self) -> None:
        self._arguments: dict[str, list[str]] = {}
        """By id; several where a server counts its calls anew in every reply."""

    def note(self, message: Any) -> None:
        """Remembers the tool calls of a reply."""
        for call in (message or {}).get("tool_calls") or ():
            self._arguments.setdefault(call["id"], []).append(call["function"]["arguments"])

    def restore(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        """`messages` with the arguments of known tool calls as they were sampled."""
        return tuple(
            {**message, "tool_calls": [self._restored(call, tools) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        )

    def _restored(self, call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        function = call["function"]
        sent, sampled = function["arguments"], self._arguments.get(call.get("id") or "", ())
        if not sampled or sent in sampled:
            return call
        schema = _schema_of(function["name"], tools)
        for text in reversed(sampled):
            if _stands_for(sent, text, schema):
                return {**call, "function": {**function, "arguments": text}}
        return call  # the agent changed them: what it sent is what the model shall see


def _schema_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    declared = (tool["function"] for tool in tools if "function" in tool)
    return next((function.get("parameters") for function in declared if function["name"] == name), None)


def _stands_for(sent: str, sampled: str, schema: Any) -> bool:
    returned, shown = arguments_object(sent), arguments_object(sampled)
    if takes_text(schema) and same_json(returned, {TEXT_ARGUMENT: text_argument(sampled)}):
        return True
    return same_json(returned, shown) or same_json(
        with_defaults(returned, schema), with_defaults(shown, schema)
    )
