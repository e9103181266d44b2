"""A reply in the pieces that a streaming chat server sends."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any

from hpcroll.testing.policy_server.reply import Reply, Span
from hpcroll.testing.policy_server.template import PartKind
from hpcroll.testing.policy_server.vocabulary import Vocabulary

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
    for kind, spans in _runs(reply):
        if kind is PartKind.CALLS:
            yield from _of_calls(reply, spans[0])
        elif kind is PartKind.MARK:
            yield {}, spans[0].start, spans[-1].stop
        else:
            yield from _of_text(reply, vocabulary, spans, strips_newlines)


def _runs(reply: Reply) -> list[tuple[PartKind, list[Span]]]:
    # Neighbours that show text are one text: a character may lie across them in a reply cut short.
    runs: list[tuple[PartKind, list[Span]]] = []
    for span in reply.spans:
        if span.start == span.stop:
            continue
        if runs and runs[-1][0] is span.kind is PartKind.TEXT:
            runs[-1][1].append(span)
        else:
            runs.append((span.kind, [span]))
    return runs


def _of_text(reply: Reply, vocabulary: Vocabulary, spans: list[Span], strip: bool) -> Iterator[Delta]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    start, stop = spans[0].start, spans[-1].stop
    field = _FIELDS[spans[0].kind]
    begun, held = False, ""
    for place in range(start, stop):
        text = held + decoder.decode(vocabulary.piece(reply.ids[place]), final=place + 1 == stop)
        held = ""
        if strip:
            text = text if begun else text.lstrip("\n")
            kept = text.rstrip("\n")
            # Newlines are held back until more text shows that they are none of the template's.
            text, held = kept, text[len(kept) :]
            begun = begun or bool(text)
        yield ({field: text} if text or not strip else {}), place, place + 1


def _of_calls(reply: Reply, span: Span) -> Iterator[Delta]:
    pieces = [piece for place in span.calls for piece in _of_call(place, reply.tool_calls[place])]
    count = span.stop - span.start
    for number, piece in enumerate(pieces):
        start = span.start + count * number // len(pieces)
        stop = span.start + count * (number + 1) // len(pieces)
        yield {"tool_calls": [piece]}, start, stop


def _of_call(place: int, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    arguments = call["function"]["arguments"]
    yield {"index": place, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
    size = max(1, -(-len(arguments) // ARGUMENT_PIECES))
    for start in range(0, len(arguments), size):
        yield {"index": place, "function": {"arguments": arguments[start : start + size]}}
