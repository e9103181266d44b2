"""What goes wrong on demand, and when."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class FaultKind(StrEnum):
    """How a reply fails. The first group makes no reply; the others spoil one that was sampled."""

    STATUS = "status"
    """An error status (`status`, `retry_after_s`) instead of a reply."""
    GARBAGE = "garbage"
    """Status 200, and bytes that are no UTF-8."""
    HTML = "html"
    """Status 200, and a page of a proxy that lost its server."""

    RESET = "reset"
    """The connection is reset after `after_tokens` ids; before any byte where the reply is whole."""
    STALL = "stall"
    """Nothing comes for `stall_s` seconds after `after_tokens` ids."""
    TRUNCATED = "truncated"
    """The JSON ends in the middle: of the body, or of the event after `after_tokens` ids."""
    NO_LOGPROBS = "no_logprobs"
    NAN_LOGPROBS = "nan_logprobs"
    NO_TOKEN_IDS = "no_token_ids"
    WRONG_USAGE = "wrong_usage"
    """Seven tokens more than were sampled."""
    VERSION = "version"
    """The policy version becomes `version` (one higher where not set) after `after_tokens` ids."""


UNSAMPLED = frozenset({FaultKind.STATUS, FaultKind.GARBAGE, FaultKind.HTML})


class Fault(BaseModel):
    """One failure; a turn that was struck `times` times is answered well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FaultKind
    after_tokens: int = Field(default=1, ge=0)
    status: int = Field(default=500, ge=400, le=599)
    retry_after_s: float | None = None
    stall_s: float = Field(default=3600.0, ge=0)
    version: int | None = None
    times: int = Field(default=1, ge=1)
