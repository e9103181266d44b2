"""A scripted reply: its ids, its fake log-probabilities, and what a client is shown of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from hpcroll.testing.policy_server.script import Turn, number
from hpcroll.testing.policy_server.template import Draft, Part, PartKind, Template
from hpcroll.testing.policy_server.vocabulary import decode, split_characters, split_some

LOWEST_LOGPROB, HIGHEST_LOGPROB = -6.0, -1e-3


@dataclass(frozen=True, slots=True)
class Span:
    """The ids [start, stop) of a reply, and what they show."""

    kind: PartKind
    start: int
    stop: int
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What was "sampled", and the message that it reads as."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Seeded numbers, each exactly a float32, below 0: scripted, of no distribution."""
    spans: tuple[Span, ...]
    reasoning: str
    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    canonical: bool
    """False where encoding the text again gives other ids."""

    @property
    def draft(self) -> Draft:
        return Draft(self.text, self.reasoning, self.tool_calls)

    def message(self) -> dict[str, Any]:
        """The assistant message, in the shape of the OpenAI Chat Completions API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


def make_reply(
    turn: Turn,
    template: Template,
    *,
    seed: int,
    identity: tuple[str, ...],
    noncanonical: float,
    max_tokens: int,
) -> Reply:
    """The reply of `turn`, cut to `max_tokens`; equal arguments give equal replies.

    `noncanonical` is the share of replies that are tokenised otherwise than their text encodes.
    """
    random = Random(number(seed, "reply", *identity))
    calls = tuple(
        {
            "id": f"call_{number(seed, 'call', *identity, place):016x}",
            "type": "function",
            "function": {"name": call.name, "arguments": template.as_read(call.argument_text())},
        }
        for place, call in enumerate(turn.tools)
    )
    parts = template.render_reply(Draft(turn.text, turn.reasoning, calls))
    canonical_ids = [token_id for part in parts for token_id in part.ids]
    groups = [[token_id] for token_id in canonical_ids]
    if turn.bytewise:
        groups = split_characters(template.vocabulary, canonical_ids)
    elif random.random() < noncanonical:
        groups = split_some(template.vocabulary, canonical_ids, random)
    every = [token_id for group in groups for token_id in group]
    ids = every[:max_tokens]
    whole = len(ids) == len(every)
    spans = _spans(parts, groups, whole=whole, length=len(ids))
    generator = np.random.default_rng(random.getrandbits(64))
    logprobs = generator.uniform(LOWEST_LOGPROB, HIGHEST_LOGPROB, size=len(ids)).astype(np.float32)
    return Reply(
        ids=tuple(ids),
        logprobs=tuple(float(value) for value in logprobs),
        spans=spans,
        reasoning=_shown(spans, PartKind.REASONING, ids, template),
        text=_shown(spans, PartKind.TEXT, ids, template),
        tool_calls=calls if whole else (),
        finish_reason="length" if not whole else "tool_calls" if calls else "stop",
        canonical=ids == canonical_ids[: len(ids)],
    )


def _spans(
    parts: Sequence[Part], groups: Sequence[Sequence[int]], *, whole: bool, length: int
) -> tuple[Span, ...]:
    spans = []
    place = start = 0
    for part in parts:
        stop = start + sum(len(group) for group in groups[place : place + len(part.ids)])
        # Cut short, what there is of the calls does not parse, and is shown as the text that it is.
        kind = PartKind.TEXT if part.kind is PartKind.CALLS and not whole else part.kind
        if start < length:
            spans.append(Span(kind, start, min(stop, length), part.calls))
        place, start = place + len(part.ids), stop
    return tuple(spans)


def runs(spans: Sequence[Span]) -> list[tuple[PartKind, int, int, tuple[int, ...]]]:
    """The spans as a client is shown them: kind, start, stop, tool calls; neighbours that are text are one.

    In a reply cut short a character may lie across two of them.
    """
    found: list[tuple[PartKind, int, int, tuple[int, ...]]] = []
    for span in spans:
        if found and found[-1][0] is span.kind is PartKind.TEXT:
            found[-1] = (span.kind, found[-1][1], span.stop, ())
        elif span.start < span.stop:
            found.append((span.kind, span.start, span.stop, span.calls))
    return found


def _shown(spans: Sequence[Span], kind: PartKind, ids: Sequence[int], template: Template) -> str:
    shown = [
        decode(template.vocabulary, ids[start:stop]) for found, start, stop, _ in runs(spans) if found is kind
    ]
    return "".join(text.strip("\n") if template.strips_newlines else text for text in shown)
