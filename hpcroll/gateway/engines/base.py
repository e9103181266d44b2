"""What the gateway needs of an inference server's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hpcroll.contract import Ids, Sampling, VersionSpan
from hpcroll.gateway.chat import ChatRequest, Delta, Message


@dataclass(frozen=True, slots=True)
class Question:
    """A call as it goes to an inference server."""

    request: ChatRequest
    sampling: Sampling
    prompt_ids: Ids | None = None
    """The rendered prompt; None where the server renders."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a reply, for a server that does not know the template."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a reply, or one piece of a streamed one, says."""

    ids: Sequence[int] = ()
    """Sampled ids, in order."""
    logprobs: Sequence[float] = ()
    entries: Sequence[Mapping[str, Any]] = ()
    """`logprobs.content` as the server gave it, for agents that ask for log-probabilities."""
    prompt_ids: Sequence[int] | None = None
    delta: Delta | None = None
    """What a piece adds for the agent; None where the server returns ids alone."""
    message: Message | None = None
    """The whole message of a reply that is not streamed, by a server that parses."""
    finish_reason: str | None = None
    stop: str | None = None
    """The stop sequence that ended the reply, by a server that says which."""
    versions: tuple[int, ...] = ()
    """Policy versions that the server named."""
    spans: tuple[VersionSpan, ...] = ()
    """Which ids of the whole reply each version sampled, by a server that says so."""
    usage: Mapping[str, int] | None = None
    """`prompt_tokens` and `completion_tokens`, as reported."""


class Reading(Protocol):
    """Reads one reply. Raises ValueError, KeyError, TypeError or AttributeError for what is no reply."""

    def take(self, data: Any) -> Part:
        """Reads the whole reply, or its next piece."""
        ...


class Engine(Protocol):
    """One API of one kind of server; stateless."""

    path: ClassVar[str]

    def body(self, question: Question, *, model: str) -> bytes:
        """The request's body: sampling as decided, token ids and log-probabilities asked for."""
        ...

    def reading(self, *, stream: bool) -> Reading: ...


def versions_of(*holders: Any) -> tuple[int, ...]:
    """The decimal `weight_version` of each holder that has one."""
    found = []
    for holder in holders:
        if isinstance(holder, dict) and "weight_version" in holder:
            number = decimal(holder["weight_version"])
            if number is not None:
                found.append(number)
    return tuple(found)


def text_or_none(value: Any) -> str | None:
    """What ended a reply: servers name a stop sequence by its text, and a token by its id."""
    return value if isinstance(value, str) else None


def decimal(value: Any) -> int | None:
    """A policy version as servers write it; SGLang says "default" until it is told one."""
    text = str(value) if isinstance(value, int | str) else ""
    return int(text) if text.isdecimal() else None
