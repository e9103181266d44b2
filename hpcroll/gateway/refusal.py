"""What an agent is told when a call gives no reply; each dialect has a shape of its own for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcroll.contract import StopReason

CONTEXT_CODE = "context_length_exceeded"
"""What OpenAI calls it, so that agents which compact their context do so."""

NOT_RECORDED_CODE = "not_recorded"

_ADDRESS = re.compile(r"https?://[^\s'\"<>]*[^\s'\"<>.,:;)]")

_LIMIT_CODES = {StopReason.CONTEXT_LIMIT: CONTEXT_CODE}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a call, in tokens."""

    longest: int
    """The longest that it may be."""
    found: int
    """The prompt, or prompt and reply."""


class Refusal(Exception):
    """An error for the agent; `kind` (OpenAI's `type`) and `code` are stable, the message is for people."""

    lengths: Lengths | None = None
    """Of a context that is too long, where they are known: agents read them out of the message."""

    def __init__(self, status: int, kind: str, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.message = message
        self.param = param


def bad_request(message: str, *, code: str = "invalid_request", param: str | None = None) -> Refusal:
    """The request itself is wrong, or asks for what hpcroll does not record."""
    return Refusal(400, "invalid_request_error", code, message, param)


def limit_reached(limit: StopReason, message: str, lengths: Lengths | None = None) -> Refusal:
    """A limit of the rollout. Status 400, because clients try 429 again."""
    refusal = Refusal(400, "invalid_request_error", _LIMIT_CODES.get(limit, limit.value), message)
    refusal.lengths = lengths
    return refusal


def limit_of(code: object) -> StopReason | None:
    """The limit that an error's `code` stands for: the inverse of `limit_reached`."""
    if code == CONTEXT_CODE:
        return StopReason.CONTEXT_LIMIT
    limits = {limit.value: limit for limit in (StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT)}
    return limits.get(code) if isinstance(code, str) else None


def upstream_failed(message: str) -> Refusal:
    """No inference server gave a usable answer.

    Once a stream has begun there is no status to tell, and some agents look for words such as these. Where
    the server stands is none of an agent's business.
    """
    told = _ADDRESS.sub("the server", message)
    return Refusal(502, "upstream_error", "upstream_failed", f"upstream server error: {told}")


def not_recorded() -> Refusal:
    """The reply could not be journalled, so it is not shown."""
    message = "the call could not be put on record; its reply is withheld"
    return Refusal(500, "server_error", NOT_RECORDED_CODE, message)


def broken_dialect(name: str, error: Exception) -> Refusal:
    """A defect of a dialect, which no second try cures."""
    return Refusal(
        400, "invalid_request_error", "dialect_failed", f"dialect {name}: {type(error).__name__}: {error}"
    )


def not_served(status: int, message: str) -> Refusal:
    """No such address, no such method, or a body that is too large."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return Refusal(status, kind, "not_served", message)


def wrong_key() -> Refusal:
    return Refusal(
        401,
        "authentication_error",
        "invalid_api_key",
        "this API key belongs to no open session; use the key that the agent was given",
    )
