"""A reply in the pieces that a streaming chat server sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpcroll.testing.policy_server.reply import Reply, runs
from hpcroll.testing.policy_server.template import PartKind
from hpcroll.testing.policy_server.vocabulary import Vocabulary, texts

ARGUMENT_PIECES = 4
"""In how many pieces the arguments of a tool call come, where they have as many characters."""

_FIELDS = {PartKind.REASONING: "reasoning_content", PartKind.TEXT: "content"}

Delta = tuple[dict[str, Any], int, int]
"""A delta, and the range [start, stop) of its ids in the reply."""


def deltas(reply: Reply, vocabulary: Vocabulary, *, strips_newlines: bool) -> Iterator[Delta]:
    """The deltas of `reply`, its ids each once and in order.

    Text and thinking come token by token, a character whose bytes lie in several tokens with its last
    one; a tool call comes as its name, then its arguments in pieces.
    """
    for kind, start, stop, calls in runs(reply.spans):
        if kind is PartKind.CALLS:
            yield from _of_calls(reply, start, stop, calls)
        elif kind is PartKind.MARK:
            yield {}, start, stop
        else:
            ids = reply.ids[start:stop]
            for place, text in enumerate(_texts(vocabulary, ids, strips_newlines), start):
                yield ({} if text is None else {_FIELDS[kind]: text}), place, place + 1


def _texts(vocabulary: Vocabulary, ids: Sequence[int], strips_newlines: bool) -> Iterator[str | None]:
    begun, held = False, ""
    for new in texts(vocabulary, ids):
        if not strips_newlines:
            yield new
            continue
        text = held + (new if begun or held else new.lstrip("\n"))
        kept = text.rstrip("\n")
        # Newlines are held back until more text shows that they are none of the template's.
        held = text[len(kept) :]
        begun = begun or bool(kept)
        yield kept or None


def _of_calls(reply: Reply, first: int, last: int, calls: Sequence[int]) -> Iterator[Delta]:
    pieces = [piece for place in calls for piece in _of_call(place, reply.tool_calls[place])]
    for number, piece in enumerate(pieces):
        start = first + (last - first) * number // len(pieces)
        stop = first + (last - first) * (number + 1) // len(pieces)
        yield {"tool_calls": [piece]}, start, stop


def _of_call(place: int, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    arguments = call["function"]["arguments"]
    yield {"index": place, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
    size = max(1, -(-len(arguments) // ARGUMENT_PIECES))
    for start in range(0, len(arguments), size):
        yield {"index": place, "function": {"arguments": arguments[start : start + size]}}
