"""Tool calls as they were sampled, for agents whose API carries arguments as objects.

An agent that parses the arguments and sends the object back lets the gateway write them anew: other spaces,
other escapes, other ids in the next prompt than were sampled. Where the object is the one that was shown,
the sampled text stands for it. Defaults that the tool's own schema declares count as shown: some agents fill
them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from hpcroll.gateway.chat import Message

UNPARSED = "unparsed_arguments"
"""The one key of the object that stands for arguments which are no JSON object."""


class Recall:
    """What one session's agent was shown, by tool call id."""

    def __init__(self) -> None:
        self._arguments: dict[str, str] = {}

    def note(self, message: Any) -> None:
        """Remembers the tool calls of a reply."""
        for call in (message or {}).get("tool_calls") or ():
            self._arguments[call["id"]] = call["function"]["arguments"]

    def restore(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        """`messages` with the arguments of known tool calls as they were sampled."""
        defaults = {
            tool["function"]["name"]: _defaults(tool["function"]) for tool in tools if "function" in tool
        }
        return tuple(
            {**message, "tool_calls": [self._restored(call, defaults) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        )

    def _restored(self, call: Any, defaults: Mapping[str, Mapping[str, Any]]) -> Any:
        function = call.get("function") or {}
        sampled, sent = self._arguments.get(call.get("id")), function.get("arguments")
        if sampled is None or sampled == sent or not isinstance(sent, str):
            return call
        filled_in = defaults.get(function.get("name") or "", {})
        if {**filled_in, **arguments_object(sampled)} != {**filled_in, **arguments_object(sent)}:
            return call  # the agent changed them: what it sent is what the model shall see
        return {**call, "function": {**function, "arguments": sampled}}


def _defaults(function: Mapping[str, Any]) -> dict[str, Any]:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {
        name: schema["default"]
        for name, schema in properties.items()
        if isinstance(schema, dict) and "default" in schema
    }


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; text that is none under the key `UNPARSED`."""
    try:
        value = from_json(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: text}
