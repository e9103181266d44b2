"""Calls as a conversation: the messages that each one added, and texts that any JSON reader takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpcroll.contract import Call, CallSpan, TrajectoryRecord

Message = dict[str, Any]


def whole_requests(calls: Sequence[Call]) -> dict[int, list[Message]]:
    """Per call index every message of its request; needs calls that were read with their text."""
    requests: dict[int, list[Message]] = {}
    replies = {call.call_index: call.reply for call in calls}
    for call in calls:
        base: list[Any] = []
        if call.messages_base is not None and call.messages_base in requests:
            base = [*requests[call.messages_base], replies[call.messages_base]]
        request = [*base[: call.messages_from], *call.messages]
        requests[call.call_index] = [message for message in request if isinstance(message, dict)]
    return requests


def new_messages(request: Sequence[Message], before: Sequence[Message]) -> list[Message]:
    """What of `request` does not repeat `before`, an earlier request and its reply: all after what both begin
    with."""
    same = 0
    while same < min(len(request), len(before)) and _alike(request[same], before[same]):
        same += 1
    return list(request[same:])


def spans_of(record: TrajectoryRecord, segment_index: int) -> list[CallSpan]:
    """The calls in a segment, in the order of their tokens."""
    return sorted(
        (span for span in record.call_spans if span.segment_index == segment_index),
        key=lambda span: span.start,
    )


def text_of(content: Any) -> str:
    """A message's content as text, parts joined by line ends."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        str(part["text"]) if isinstance(part, dict) and "text" in part else json.dumps(part) for part in parts
    )


def thought_of(message: Message) -> str:
    """What the message says the model thought."""
    return text_of(message.get("reasoning_content") or message.get("reasoning"))


def tool_calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Id, name and arguments (as text) of each tool call of a message."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            found.append((str(call.get("id") or ""), str(function.get("name") or ""), text))
    return found


def whole_text(value: Any) -> Any:
    """`value` with U+FFFD in place of half surrogate pairs, which strict readers refuse."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole_text(key): whole_text(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [whole_text(inner) for inner in value]
    return value


def _alike(one: Message, other: Message) -> bool:
    """Whether two messages are the same; agents leave empty fields out when they send a reply back."""
    return {k: v for k, v in one.items() if v} == {k: v for k, v in other.items() if v}
