"""Prompts and messages as deltas: a conversation's next call repeats almost all of what came before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcroll.contract import Call, CallTokens, FoldedPrompt, Ids
from hpcroll.trajectory import common_length

REMEMBERED_CALLS = 8
"""Latest calls of a session that a prompt may build on: enough for a few subagents side by side."""


class PromptFolder:
    """Folds the prompts of one session onto earlier calls; only the latest few are held whole."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, CallTokens, Ids]] = deque(maxlen=REMEMBERED_CALLS)

    def fold(self, call_index: int, tokens: CallTokens) -> CallTokens:
        """`tokens` with the prompt folded onto the remembered call that it shares most with."""
        prompt = tokens.prompt_ids
        best: FoldedPrompt | None = None
        # A call that the prompt repeats whole says nothing more: it is forgotten, else the oldest is.
        kept: deque[tuple[int, CallTokens, Ids]] = deque(maxlen=REMEMBERED_CALLS)
        for index, base, ids in self._latest:
            keep = common_length(ids, prompt)
            if keep and (best is None or keep >= best.keep):
                best = FoldedPrompt(index, base, keep, prompt[:0])
            if keep < len(ids):
                kept.append((index, base, ids))
        if best is not None:
            # A copy: a view would hold the whole prompt.
            best = FoldedPrompt(best.base_index, best.base, best.keep, prompt[best.keep :].copy())
        folded = CallTokens(prompt if best is None else best, tokens.sampled_ids, tokens.logprobs)
        kept.append((call_index, folded, np.concatenate([prompt, tokens.sampled_ids])))
        self._latest = kept
        return folded


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
