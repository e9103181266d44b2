"""Calls whose reply the agent quoted in place of its past: summaries that nobody declared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from hpcroll.contract import Call, CallPurpose
from hpcroll.trajectory.strands import Woven

_LATEST = 4
"""Calls before a rewritten context among which its summary is looked for."""
_SHORTEST_LINE = 20
"""Characters of a line below which it may stand in two texts by chance."""


def find_asides(calls: Sequence[Woven]) -> set[Woven]:
    """Calls that were asked for a summary, known by what the agent did with it.

    Three things must hold: no later prompt goes on from the call; a later context of the conversation, on
    which it goes on, leaves out the call's own prompt; and most of the reply's text stands there in a
    message that is not the assistant's.
    """
    gone_on_from = {woven.above for woven in calls}
    gone_on_from |= {woven.base for woven in calls if woven.keeps_prompt}
    found = set()
    for position, woven in enumerate(calls):
        own = woven.purpose is CallPurpose.MAIN and woven in gone_on_from
        if not own or woven.base is None or woven.keeps_prompt:
            continue
        text = "\n".join(_words_of_others(woven.recorded.call))
        for earlier in calls[max(0, position - _LATEST) : position]:
            dropped = woven.common < earlier.start and earlier not in gone_on_from
            if dropped and not earlier.aborted and _is_quoted(earlier.recorded.call, text):
                found.add(earlier)
    return found


def _is_quoted(call: Call, text: str) -> bool:
    reply = call.reply
    if not isinstance(reply, dict) or reply.get("tool_calls"):
        return False
    lines = [line.strip() for part in texts(reply.get("content")) for line in part.splitlines()]
    lines = [line for line in lines if len(line) >= _SHORTEST_LINE]
    quoted = sum(len(line) for line in lines if line in text)
    return bool(lines) and 2 * quoted > sum(map(len, lines))


def _words_of_others(call: Call) -> Iterator[str]:
    for message in call.messages:
        if isinstance(message, dict) and message.get("role") not in ("assistant", "tool"):
            yield from texts(message.get("content"))


def texts(content: JsonValue) -> Iterator[str]:
    """The texts of a message's content, which is one, or parts that hold them."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str):
                yield text
