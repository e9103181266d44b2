"""What a dialect is: an API that agents call their model by, translated to and from Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from hpcroll.gateway.chat import ChatRequest, Delta, Reply
from hpcroll.gateway.refusal import Refusal, bad_request

SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request as it came in."""

    body: Mapping[str, Any]
    route: str = ""
    """The one of the dialect's routes that it came by."""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


class Caller(Protocol):
    """One call of an agent: its request, and the reply in its own shape.

    A streamed reply is `opening`, `delta` for each piece and `closing`, concatenated; where the call breaks
    off after the opening, `broken` is its end. Each returns whole events, or nothing.
    """

    request: ChatRequest
    content_type: str
    """Of a streamed reply."""

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        """The body of a reply that is not streamed."""
        ...

    def opening(self, prompt_tokens: int) -> bytes:
        """`prompt_tokens`: 0 where the server has not said yet."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def closing(self, reply: Reply) -> bytes: ...

    def broken(self, refusal: Refusal) -> bytes: ...


class Dialect(Protocol):
    """Constructed once per gateway, without I/O."""

    name: ClassVar[str]
    calls: ClassVar[tuple[str, ...]]
    """Routes of `POST` requests that sample, as aiohttp writes them: `/v1/models/{model}:generate`."""
    counts: ClassVar[tuple[str, ...]]
    """Routes of `POST` requests that ask how many tokens a prompt has."""

    def __init__(self, model: str) -> None:
        """`model`: the one model's name, as agents see it."""
        ...

    def read(self, call: HttpCall) -> Caller:
        """Raises `Refusal` that names what is wrong or not supported."""
        ...

    def read_count(self, call: HttpCall) -> ChatRequest:
        """The request whose prompt is to be counted."""
        ...

    def count(self, tokens: int) -> Mapping[str, Any]:
        """The answer to a count."""
        ...

    def refusal(self, refusal: Refusal) -> Mapping[str, Any]:
        """The body of an error, with the status of `refusal`."""
        ...

    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        """What `GET` requests of a route get: the list of models."""
        ...


def unsupported_content(kind: object, param: str) -> Refusal:
    """The request holds content that is not text."""
    return bad_request(
        f"{param}: content of type {kind!r} is not supported: hpcroll records text only, and a trajectory "
        "without what the model saw would be wrong",
        code="unsupported_content",
        param=param,
    )
