"""Chat messages as templates see them, and when an assistant message is the reply that was given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcroll.errors import HpcrollError
from hpcroll.gateway.arguments import same_json
from hpcroll.gateway.chat import Message, thought_of

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class CannotRenderError(HpcrollError):
    """The request holds something that the renderer cannot put into a prompt without losing it."""


def plain_message(message: Mapping[str, Any], index: int) -> Message:
    """What a template sees of `message`, in one form: two messages of equal form render alike.

    `content` is text (parts are concatenated, null is empty), arguments of tool calls are objects where they
    are JSON objects, `reasoning_content` and `tool_calls` are left out where they are empty, and so is
    everything that no template reads (`cache_control`, `refusal`, ...). Raises `CannotRenderError` for
    content that is not text.
    """
    role = message.get("role")
    if role not in _ROLES:
        raise CannotRenderError(f"messages[{index}]: role {role!r} is not one of {', '.join(sorted(_ROLES))}")
    plain: Message = {"role": role, "content": _text(message.get("content"), index)}
    if role == "assistant":
        if thought := thought_of(message):
            plain["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [_call(call) for call in calls]
    if role == "tool":
        plain["tool_call_id"] = str(message.get("tool_call_id") or "")
    if name := message.get("name"):
        plain["name"] = str(name)
    return plain


def differences(given: Message, returned: Message, *, native_ids: bool = False) -> list[str]:
    """The fields in which an assistant message that came back differs from the reply that was given.

    Both are plain. Thinking that came back empty is not a difference: most agents drop it. Arguments are
    compared as JSON values, so that the order of keys and the spelling of a number (1.0 and 1, which one
    double has in JavaScript) make none; ids of tool calls count only where the model itself wrote them.
    """
    fields = []
    if returned["content"] != given["content"]:
        fields.append("content")
    thought = returned.get("reasoning_content", "").strip()
    if thought and thought != given.get("reasoning_content", "").strip():
        fields.append("reasoning_content")
    if (returned.get("name") or "") != (given.get("name") or ""):
        fields.append("name")
    ours, theirs = given.get("tool_calls") or [], returned.get("tool_calls") or []
    if len(ours) != len(theirs):
        return [*fields, "tool_calls"]
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine["function"]["name"] != other["function"]["name"]:
            fields.append(f"tool_calls[{index}].name")
        if not same_json(mine["function"]["arguments"], other["function"]["arguments"]):
            fields.append(f"tool_calls[{index}].arguments")
        if native_ids and mine["id"] != other["id"]:
            fields.append(f"tool_calls[{index}].id")
    return fields


def call_ids(message: Message) -> list[str]:
    """The ids of an assistant message's tool calls."""
    return [call["id"] for call in message.get("tool_calls") or ()]


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Tool messages with the `name` of the function whose result they are, where a call before says so."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        named.append({**message, "name": name} if name and not message.get("name") else message)
    return named


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_text(key, change): map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(item, change) for item in value]
    return value


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise CannotRenderError(f"messages[{index}].content is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif (
            isinstance(part, Mapping)
            and part.get("type") in _TEXT_PARTS
            and isinstance(part.get("text"), str)
        ):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise CannotRenderError(f"messages[{index}].content: a part of type {kind!r} is not text")
    return "".join(texts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {
            "name": str(function.get("name") or ""),
            "arguments": _arguments(function.get("arguments")),
        },
    }


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
        # A lone surrogate is JSON but no text: only its escaped spelling can be encoded.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
