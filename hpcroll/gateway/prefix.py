"""Prompts as deltas: a conversation's next prompt repeats almost all of what came before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcroll.contract import Call, Ids

REMEMBERED_CALLS = 8
"""Latest calls of a session that a prompt may build on: enough for a few subagents side by side."""


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """A prompt as the first `keep` ids of call `base` (prompt and samples), then `tail`."""

    base: int | None
    keep: int
    tail: Ids


class SessionTokens:
    """The latest token sequences of one session, the same for the writer and the reader of a journal."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, Ids]] = deque(maxlen=REMEMBERED_CALLS)

    def delta(self, prompt: Ids) -> PromptDelta:
        """`prompt` against the remembered sequence that it shares most with."""
        best = PromptDelta(None, 0, prompt)
        for call_index, ids in reversed(self._latest):
            keep = common_length(ids, prompt)
            if keep > best.keep:
                best = PromptDelta(call_index, keep, prompt[keep:])
        return best

    def restore(self, delta: PromptDelta) -> Ids:
        """The inverse of `delta`; raises `KeyError` where its base is not remembered."""
        if delta.base is None:
            return delta.tail
        for call_index, ids in reversed(self._latest):
            if call_index == delta.base and len(ids) >= delta.keep:
                return np.concatenate([ids[: delta.keep], delta.tail])
        raise KeyError(delta.base)

    def add(self, call_index: int, prompt: Ids, sampled: Ids) -> None:
        """Remembers a call, forgetting those that it repeats whole, else the oldest."""
        ids = np.concatenate([prompt, sampled])
        kept = [item for item in self._latest if common_length(item[1], ids) < len(item[1])]
        self._latest = deque([*kept, (call_index, ids)], maxlen=REMEMBERED_CALLS)


def common_length(left: Ids, right: Ids) -> int:
    """How many leading ids the two share."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


class MessageList:
    """A session's messages so far: those of the latest request, then its reply once there is one."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._messages)

    def begin(self, messages: Sequence[Any]) -> tuple[int, int]:
        """Takes a new request's messages: a ticket for its reply, and how many it repeats."""
        repeated = 0
        for old, new in zip(self._messages, messages, strict=False):
            if old != new:
                break
            repeated += 1
        self._messages = list(messages)
        self._turn += 1
        return self._turn, repeated

    def reply(self, ticket: int, message: Any) -> None:
        """Takes a request's reply; without effect where another request began since."""
        if ticket == self._turn:
            self._messages.append(message)


def unfold_messages(calls: Sequence[Call]) -> list[list[Any]]:
    """The full messages of each call's request, from calls of one attempt in order of their start.

    Raises `ValueError` where a call is missing in between.
    """
    result: list[list[Any]] = []
    so_far: list[Any] = []
    for call in calls:
        if call.messages_from > len(so_far):
            raise ValueError(
                f"rollout {call.rollout_id} attempt {call.attempt}: call {call.call_index} repeats "
                f"{call.messages_from} messages, only {len(so_far)} are known; an earlier call is missing"
            )
        messages = [*so_far[: call.messages_from], *call.messages]
        result.append(messages)
        so_far = messages if call.reply is None else [*messages, call.reply]
    return result
