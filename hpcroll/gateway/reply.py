"""A reply while it arrives: its tokens, its message, and whether it can be trained on."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcroll.contract import CallTokens, Ids, LogprobKind, Usage, VersionSpan
from hpcroll.errors import ModelError
from hpcroll.gateway.chat import Delta, Message, MessageBuilder, Reply
from hpcroll.gateway.engines.base import Part, decimal

_BROKEN_OFF = ("abort", "error")
"""How vLLM calls the end of a reply that it did not end itself."""
_HINT = "the server must honour return_token_ids and logprobs, see docs/reference/gateway.md"


class ReplyReader:
    """Puts the parts of a reply together; at every moment it holds what came so far."""

    def __init__(self, kind: LogprobKind = LogprobKind.RAW) -> None:
        """`kind`: of the log-probabilities, where the engine does not say."""
        self.finish_reason: str | None = None
        self.stop: str | None = None
        """The stop sequence that ended it."""
        self.versions: list[int] = []
        """Policy versions that the engine named, in order."""
        self._kind = kind
        self._prompt_ids: Ids | None = None
        self._sampled_ids = _ids(())
        self._logprobs: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._message: Message | None = None
        self._builder = MessageBuilder()
        self._entries: list[Mapping[str, Any]] = []
        self._spans: tuple[VersionSpan, ...] = ()

    def expect(self, prompt_ids: Ids) -> None:
        """The prompt that the engine is given, where it is given ids."""
        self._prompt_ids = prompt_ids

    def take_headers(self, headers: Mapping[str, str]) -> None:
        """Reads the policy version and the kind of log-probabilities that headers name."""
        if (version := decimal(headers.get("X-Policy-Version"))) is not None:
            self.versions.append(version)
        if headers.get("X-Logprob-Kind") == LogprobKind.SAMPLING:
            self._kind = LogprobKind.SAMPLING

    def take(self, part: Part) -> None:
        """Adds the whole reply, or its next part."""
        self.versions += part.versions
        self._usage = part.usage or self._usage
        if part.prompt_ids:
            self._take_prompt(np.array(_ids(part.prompt_ids), dtype=np.uint32))
        self._sampled_ids += _ids(part.ids)
        self._logprobs += part.logprobs
        self.finish_reason = part.finish_reason or self.finish_reason
        self.stop = part.stop or self.stop
        self._message = part.message or self._message
        self._entries += part.entries
        self._spans = part.spans or self._spans
        if part.delta is not None:
            self._builder.add(part.delta)

    def show(self, delta: Delta) -> None:
        """Adds what the gateway itself read from the ids."""
        self._builder.add(delta)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which version sampled which ids; empty unless the engine said so of every id."""
        end = 0
        for span in self._spans:
            if span.start != end:
                return ()
            end += span.length
        return self._spans if end == len(self._sampled_ids) else ()

    @property
    def message(self) -> Message:
        """The assistant message so far."""
        return self._builder.message() if self._message is None else self._message

    @property
    def logprob_kind(self) -> LogprobKind:
        """Of which distribution."""
        return self._kind if self._logprobs else LogprobKind.NONE

    def _take_prompt(self, ids: Ids) -> None:
        if self._prompt_ids is None:
            self._prompt_ids = ids
        elif not np.array_equal(self._prompt_ids, ids):
            raise ValueError("prompt_token_ids that are not the prompt's")

    def tokens(self) -> CallTokens:
        """The tokens so far; a missing log-probability is NaN."""
        nothing = np.zeros(0, dtype=np.uint32)
        sampled = np.array(self._sampled_ids, dtype=np.uint32)
        logprobs = np.full(len(sampled), np.nan, dtype=np.float32)
        known = self._logprobs[: len(sampled)]
        logprobs[: len(known)] = known
        return CallTokens(nothing if self._prompt_ids is None else self._prompt_ids, sampled, logprobs)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; 0 until the engine names it."""
        return 0 if self._prompt_ids is None else len(self._prompt_ids)

    def usage(self) -> Usage:
        """Token counts as reported and as the ids count."""
        reported = {name: value for name, value in self._usage.items() if isinstance(value, int)}
        return Usage(
            prompt_reported=reported.get("prompt_tokens"),
            completion_reported=reported.get("completion_tokens"),
            prompt_counted=self.prompt_tokens,
            completion_counted=len(self._sampled_ids),
        )

    def check(self, endpoint: str) -> None:
        """Raises `ModelError`, which says what is missing, for a reply that cannot be trained on."""
        counts = self.usage()
        missing = None
        sampled = counts.completion_counted
        if not counts.prompt_counted:
            missing = "no prompt_token_ids"
        elif self.finish_reason is None:
            missing = "no finish_reason: it ended in the middle"
        elif not sampled and counts.completion_reported != 0:
            missing = "no token_ids"
        elif sampled != (counts.completion_reported or sampled):
            # A stream whose tool parser swallows chunks loses their ids with them.
            missing = f"{sampled} token_ids, and its usage counts {counts.completion_reported}"
        elif len(self._logprobs) != sampled:
            missing = f"{len(self._logprobs)} log-probabilities for {sampled} token_ids"
        elif not all(math.isfinite(logprob) for logprob in self._logprobs):
            missing = "log-probabilities that are not finite"
        elif self.finish_reason in _BROKEN_OFF:
            raise ModelError(f"{endpoint} broke off its reply: finish_reason {self.finish_reason!r}")
        if missing is not None:
            raise ModelError(f"the reply of {endpoint} has {missing}; {_HINT}")

    def reply(self) -> Reply:
        """The reply for the agent, once it is complete."""
        counts, message = self.usage(), self.message
        reason = "length" if self.finish_reason == "length" else "stop"
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        return Reply(
            message=message,
            finish_reason=reason,
            stop=self.stop,
            prompt_tokens=counts.prompt_counted,
            completion_tokens=counts.completion_counted,
            logprobs=tuple(self._entries),
        )


def _ids(values: Sequence[int]) -> array[int]:
    # Checks every number on the way, and takes a fifth of the time that numpy takes for a list.
    try:
        return array("I", values)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids that are not a list of unsigned 32-bit numbers: {error}") from error
