"""One reply on its way out, with what a fault makes of its numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcroll.testing.policy_server.faults import Fault, FaultKind
from hpcroll.testing.policy_server.reply import Reply
from hpcroll.testing.policy_server.vocabulary import Vocabulary

_EXTRA_TOKENS = 7


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What the wires write down, each in its own words."""

    body: dict[str, Any]
    """The request."""
    prompt: list[int]
    reply: Reply
    request_id: str
    model: str
    vocabulary: Vocabulary
    strips_newlines: bool
    incremental: bool
    """Whether SGLang's native streams hold what is new, instead of all so far."""
    fault: Fault | None
    stated_usage: dict[str, Any]
    version: Callable[[], int | None]
    """The policy version now; None where the server keeps it to itself."""

    def struck_by(self, kind: FaultKind) -> bool:
        return self.fault is not None and self.fault.kind is kind

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every body and event of OpenAI's endpoints begins with."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            **self.weight_version(),
        }

    def weight_version(self) -> dict[str, str]:
        # As SGLang names it; a stream that a weight update falls into names both versions.
        version = self.version()
        return {} if version is None else {"weight_version": str(version)}

    def headers(self) -> dict[str, str]:
        version = self.version()
        return {"X-Scripted": "true", **({} if version is None else {"X-Policy-Version": str(version)})}

    @property
    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    def usage(self) -> dict[str, Any]:
        extra = _EXTRA_TOKENS if self.struck_by(FaultKind.WRONG_USAGE) else 0
        prompt, completion = len(self.prompt), len(self.reply.ids) + extra
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            **self.stated_usage,
        }

    def token_ids(self, start: int, stop: int) -> list[int] | None:
        """The ids [start, stop); None where a fault keeps them back."""
        return None if self.struck_by(FaultKind.NO_TOKEN_IDS) else list(self.reply.ids[start:stop])

    def logprobs(self, start: int, stop: int) -> list[float] | None:
        """The log-probabilities [start, stop), or what a fault makes of them."""
        if self.struck_by(FaultKind.NO_LOGPROBS):
            return None
        if self.struck_by(FaultKind.NAN_LOGPROBS):
            return [math.nan] * (stop - start)
        return list(self.reply.logprobs[start:stop])

    def pieces(self, start: int, stop: int) -> list[bytes]:
        return [self.vocabulary.piece(token_id) for token_id in self.reply.ids[start:stop]]
