"""Prompts and messages as deltas: a conversation's next call repeats almost all of what came before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """A request's messages as the first `keep` of an earlier call's, its reply last, and what is new."""

    base: int | None
    """`call_index` of that call."""
    keep: int
    new: tuple[Any, ...]
    is_next: bool
    """The request repeats all of them: it goes on from that call's reply, where there was one."""


class MessageFolder:
    """Folds the messages of one session's requests onto earlier calls; only the latest few are held."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, list[Any]]] = deque(maxlen=REMEMBERED_CALLS)

    def fold(self, call_index: int, messages: Sequence[Any]) -> MessageDelta:
        """`messages` against the remembered call that they share most with, the latest of equals."""
        best = MessageDelta(None, 0, tuple(messages), False)
        kept: deque[tuple[int, list[Any]]] = deque(maxlen=REMEMBERED_CALLS)
        for index, known in self._latest:
            keep = _common_messages(known, messages)
            whole = keep == len(known)
            if keep and keep >= best.keep:
                best = MessageDelta(index, keep, tuple(messages[keep:]), whole)
            if not whole:
                kept.append((index, known))
        kept.append((call_index, list(messages)))
        self._latest = kept
        return best

    def reply(self, call_index: int, message: Any) -> None:
        """Takes a call's reply; without effect where a later request repeats the call's messages."""
        for index, known in self._latest:
            if index == call_index and message is not None:
                known.append(message)


def _common_messages(left: Sequence[Any], right: Sequence[Any]) -> int:
    count = 0
    for old, new in zip(left, right, strict=False):
        if old != new:
            break
        count += 1
    return count


def unfold_messages(calls: Sequence[Call]) -> list[list[Any]]:
    """The full messages of each call's request, from calls of one attempt in order of their start.

    Raises `ValueError` where a call is missing that a later one builds on.
    """
    known: dict[int, list[Any]] = {}
    result: list[list[Any]] = []
    for call in calls:
        base = [] if call.messages_base is None else known.get(call.messages_base, [])
        if call.messages_from > len(base):
            raise ValueError(
                f"rollout {call.rollout_id} attempt {call.attempt}: call {call.call_index} repeats "
                f"{call.messages_from} messages of call {call.messages_base}, and {len(base)} are known; an "
                "earlier call is missing"
            )
        messages = [*base[: call.messages_from], *call.messages]
        result.append(messages)
        known[call.call_index] = messages if call.reply is None else [*messages, call.reply]
    return result
