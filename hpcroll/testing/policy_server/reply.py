"""A scripted reply: its ids, its fake log-probabilities, and what a client is shown of it."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from hpcroll.testing.policy_server.script import Turn, number
from hpcroll.testing.policy_server.template import ReplyText, calls_text, render_reply
from hpcroll.testing.policy_server.tokens import EOS, TOOL_CALLS, Tokens

LOWEST_LOGPROB, HIGHEST_LOGPROB = -6.0, -1e-3


@dataclass(frozen=True, slots=True)
class Reply:
    """What was "sampled", and the message that it reads as."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Seeded numbers, each exactly a float32, below 0: scripted, of no distribution."""
    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    canonical: bool
    """False where encoding the text again gives other ids."""

    @property
    def reply_text(self) -> ReplyText:
        return self.text, calls_text(self.tool_calls)

    def message(self) -> dict[str, Any]:
        """The assistant message, in the shape of the OpenAI Chat Completions API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


def make_reply(
    turn: Turn, tokens: Tokens, *, seed: int, identity: tuple[str, ...], noncanonical: float, max_tokens: int
) -> Reply:
    """The reply of `turn`, cut to `max_tokens`; equal arguments give equal replies.

    `noncanonical` is the share of replies that are tokenised otherwise than their text encodes.
    """
    random = Random(number(seed, "reply", *identity))
    calls = tuple(
        {
            "id": f"call_{number(seed, 'call', *identity, place):016x}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.argument_text()},
        }
        for place, call in enumerate(turn.tools)
    )
    canonical_ids = render_reply((turn.text, calls_text(calls)), tokens)
    ids = tokens.resplit(canonical_ids, random) if random.random() < noncanonical else canonical_ids
    whole = len(ids) <= max_tokens
    ids = ids[:max_tokens]
    generator = np.random.default_rng(random.getrandbits(64))
    logprobs = generator.uniform(LOWEST_LOGPROB, HIGHEST_LOGPROB, size=len(ids)).astype(np.float32)
    if whole:
        text, reason = turn.text, "tool_calls" if calls else "stop"
    else:
        # Cut short: what there is of the calls does not parse, and is shown as the text that it is.
        text, reason, calls = tokens.decode(ids), "length", ()
    return Reply(
        ids=tuple(ids),
        logprobs=tuple(float(value) for value in logprobs),
        text=text,
        tool_calls=calls,
        finish_reason=reason,
        canonical=ids == canonical_ids[: len(ids)],
    )


def logprob_content(reply: Reply, tokens: Tokens, start: int, stop: int) -> list[dict[str, Any]]:
    """`logprobs.content` of tokens [start, stop)."""
    entries = []
    for token_id, logprob in zip(reply.ids[start:stop], reply.logprobs[start:stop], strict=True):
        piece = tokens.piece(token_id)
        entries.append(
            {
                "token": piece.decode("utf-8", errors="replace"),
                "logprob": logprob,
                "bytes": list(piece),
                "top_logprobs": [],
            }
        )
    return entries


def stream_parts(reply: Reply, tokens: Tokens) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The deltas of a streamed reply, each with the range [start, stop) of its tokens.

    Text comes token by token, tool calls in one delta each, all their tokens with the first.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    stop_of_text = len(reply.ids)
    if reply.tool_calls:
        stop_of_text = reply.ids.index(TOOL_CALLS)
    elif reply.ids and reply.ids[-1] == EOS:
        stop_of_text -= 1
    for place in range(stop_of_text):
        last = place + 1 == stop_of_text
        text = decoder.decode(tokens.piece(reply.ids[place]), final=last)
        yield {"content": text}, place, place + 1
    start = stop_of_text
    stop_of_calls = len(reply.ids) - 1
    for index, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": index, **call}]}, start, stop_of_calls
        start = stop_of_calls
    if start < len(reply.ids):
        yield {}, start, len(reply.ids)
