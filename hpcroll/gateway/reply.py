"""A Chat Completions reply: its tokens taken, and what the agent is shown of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcroll.contract import CallTokens, Ids, LogprobKind, Usage
from hpcroll.errors import ModelError

_HINT = "the server must honour return_token_ids and logprobs, see docs/reference/gateway.md"
_EMPTY_FIELDS = ("refusal", "audio", "function_call", "annotations", "tool_calls", "reasoning_content")


class ReplyReader:
    """Reads a reply, whole or in chunks; at every moment it holds what came so far."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": None}
        self.finish_reason: str | None = None
        self.versions: list[int] = []
        """Policy versions that the engine named, in order."""
        self._kind = LogprobKind.RAW
        self._prompt_ids: Ids | None = None
        self._sampled_ids: list[Ids] = []
        self._logprobs: list[float] = []
        self._usage: Mapping[str, Any] = {}

    def take_headers(self, headers: Mapping[str, str]) -> None:
        """Reads the policy version and the kind of log-probabilities that headers name."""
        self._take_version(headers.get("X-Policy-Version"))
        if headers.get("X-Logprob-Kind") == LogprobKind.SAMPLING:
            self._kind = LogprobKind.SAMPLING

    @property
    def logprob_kind(self) -> LogprobKind:
        """Of which distribution: RAW, as engines return by default, unless the engine says otherwise."""
        return self._kind if self._logprobs else LogprobKind.NONE

    def take(self, data: Mapping[str, Any]) -> None:
        """Reads a whole reply or one chunk of a streamed one."""
        self._take_versions(data)
        self._usage = data.get("usage") or self._usage
        self._take_prompt(data.get("prompt_token_ids"))
        for choice in data.get("choices") or ():
            self._take_versions(choice)
            self._take_prompt(choice.get("prompt_token_ids"))
            if ids := choice.get("token_ids"):
                self._sampled_ids.append(_ids(ids))
            content = (choice.get("logprobs") or {}).get("content") or ()
            self._logprobs += [float(entry["logprob"]) for entry in content]
            if reason := choice.get("finish_reason"):
                self.finish_reason = str(reason)
            if (message := choice.get("message")) is not None:
                self.message = clean_message(message)
            elif (delta := choice.get("delta")) is not None:
                _merge(self.message, delta)

    def tokens(self) -> CallTokens:
        """The tokens so far; a missing log-probability is NaN."""
        nothing = np.zeros(0, dtype=np.uint32)
        sampled = np.concatenate([nothing, *self._sampled_ids])
        logprobs = np.full(len(sampled), np.nan, dtype=np.float32)
        known = self._logprobs[: len(sampled)]
        logprobs[: len(known)] = known
        return CallTokens(nothing if self._prompt_ids is None else self._prompt_ids, sampled, logprobs)

    def usage(self) -> Usage:
        """Token counts as reported and as the ids count."""
        reported = {name: value for name, value in self._usage.items() if isinstance(value, int)}
        return Usage(
            prompt_reported=reported.get("prompt_tokens"),
            completion_reported=reported.get("completion_tokens"),
            prompt_counted=0 if self._prompt_ids is None else len(self._prompt_ids),
            completion_counted=sum(map(len, self._sampled_ids)),
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
        if missing is not None:
            raise ModelError(f"the reply of {endpoint} has {missing}; {_HINT}")

    def _take_prompt(self, ids: list[int] | None) -> None:
        if ids and self._prompt_ids is None:
            self._prompt_ids = _ids(ids)

    def _take_versions(self, data: Mapping[str, Any]) -> None:
        for holder in (data, data.get("metadata"), data.get("meta_info")):
            if isinstance(holder, dict):
                self._take_version(holder.get("weight_version"))

    def _take_version(self, value: Any) -> None:
        # SGLang says "default" until it is told a version: that names nothing.
        text = str(value) if isinstance(value, (int, str)) else ""
        if text.isdecimal():
            self.versions.append(int(text))


def _ids(values: list[int]) -> Ids:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 1 << 32:
        raise ValueError("token ids that are not a list of unsigned 32-bit numbers")
    return array.astype(np.uint32)


def clean_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant message without the empty fields that servers add and clients do not send back."""
    return {name: value for name, value in message.items() if value or name not in _EMPTY_FIELDS}


def shown(data: Mapping[str, Any], *, model: str, with_logprobs: bool) -> dict[str, Any]:
    """A reply or chunk as the agent gets it: without what only the record needs."""
    hidden = ("prompt_token_ids", "prompt_logprobs", "weight_version", "meta_info", "kv_transfer_params")
    result = {name: value for name, value in data.items() if name not in hidden}
    result["model"] = model
    result["choices"] = [_shown_choice(choice, with_logprobs) for choice in data.get("choices") or ()]
    return result


def _shown_choice(choice: Mapping[str, Any], with_logprobs: bool) -> dict[str, Any]:
    hidden = ("token_ids", "prompt_token_ids", "meta_info", *(() if with_logprobs else ("logprobs",)))
    result = {name: value for name, value in choice.items() if name not in hidden}
    if isinstance(message := result.get("message"), dict):
        result["message"] = clean_message(message)
    return result


def is_action(data: Mapping[str, Any]) -> bool:
    """True for a chunk that an agent may act upon: a tool call, or the end."""
    return any(
        choice.get("finish_reason") or (choice.get("delta") or {}).get("tool_calls")
        for choice in data.get("choices") or ()
    )


def _merge(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            _merge_calls(message.setdefault("tool_calls", []), value or ())
        elif isinstance(value, str) and value and name != "role":
            message[name] = (message.get(name) or "") + value
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)


def _merge_calls(calls: list[dict[str, Any]], deltas: Any) -> None:
    for delta in deltas:
        index = delta.get("index", 0)
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call["id"] = delta.get("id") or call["id"]
        function = delta.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
