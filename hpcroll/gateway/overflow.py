"""Reads from a server's refusal that, and by how much, a call exceeds the model's context."""

from __future__ import annotations

import re

from hpcroll.gateway.refusal import CONTEXT_CODE, Lengths
from hpcroll.gateway.upstream import UpstreamRefusal

# As vLLM, SGLang and OpenAI put it.
_OVERFLOW = re.compile(
    r"context length|context window|max_model_len|longer than the maximum model length", re.I
)
_LONGEST = re.compile(r"(?:context length (?:is only|is|of)|maximum model length of) (\d+)", re.I)
_PROMPT = re.compile(
    r"\((\d+) in the messages|(?:has|passed|contains(?: at least)?) (\d+) input tokens"
    r"|(\d+) tokens from the input messages|prompt \(length (\d+)\)",
    re.I,
)


def is_overflow(refusal: UpstreamRefusal) -> bool:
    """True where the prompt, with the reply that was asked for, is too long for the model."""
    if refusal.status not in (400, 413, 422):
        return False
    return refusal.code == CONTEXT_CODE or _OVERFLOW.search(refusal.message) is not None


def read_lengths(refusal: UpstreamRefusal) -> Lengths | None:
    """The longest context and the prompt's length, where the message says both."""
    longest, prompt = _LONGEST.search(refusal.message), _PROMPT.search(refusal.message)
    if longest is None or prompt is None:
        return None
    return Lengths(int(longest[1]), int(next(number for number in prompt.groups() if number is not None)))
