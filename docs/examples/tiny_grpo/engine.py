"""Samples replies for many conversations at once, and takes new weights up as they are published."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hpcroll.policy import PolicyRegistry, PolicyVersion
from tiny_grpo.language import END, ID
from tiny_grpo.model import Cache, Policy, load_policy

_SLOTS = 32
"""Conversations that are sampled at once; further ones wait."""
_LOOK_S = 0.2
"""Seconds between two looks at the registry."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A reply: `ids` with the `logprob` of each, why it ended, and the one version that sampled all of it."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int


@dataclass(slots=True)
class _Conversation:
    prompt: list[int]
    max_tokens: int
    random: np.random.Generator
    done: Future[Sample]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        if self.ids and self.ids[-1] == ID[END]:
            return "stop"
        return "length" if len(self.ids) >= self.max_tokens else None


class Engine:
    """A thread that samples with the newest published weights; `sample` is for the event loop.

    Weights change between conversations, never within a reply: what is under way ends first, which with
    replies as short as ours takes milliseconds, and so every reply can name its version.
    """

    def __init__(self, registry: PolicyRegistry) -> None:
        self._registry = registry
        self._waiting: queue.SimpleQueue[_Conversation | None] = queue.SimpleQueue()
        self._active: dict[int, _Conversation] = {}
        self._cache = Cache.empty(_SLOTS)
        self._policy = Policy()
        self._version = -1
        self._newer: PolicyVersion | None = None
        self._look_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Returns once the newest published weights are loaded; raises `RuntimeError` for none."""
        self._look()
        if self._newer is None:
            raise RuntimeError("no policy version is published yet: publish version 0 first")
        self._load()
        self._thread.start()

    async def sample(self, prompt: list[int], *, max_tokens: int, seed: int | None) -> Sample:
        """One reply to `prompt` (both together within the context), at temperature 1.

        Without a seed the prompt itself is the seed: the same weights say the same again.
        """
        conversation = _Conversation(
            prompt, max_tokens, np.random.default_rng(prompt if seed is None else seed), Future()
        )
        self._waiting.put(conversation)
        return await asyncio.wrap_future(conversation.done)

    def stop(self) -> None:
        """Ends the thread; what waits is not answered."""
        self._stopping = True
        self._waiting.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        while not self._stopping:
            if self._active:
                self._advance(list(self._active))
            self._look()
            if self._newer is None:
                self._admit()
            elif not self._active:  # until then nobody is admitted
                self._load()

    def _look(self) -> None:
        """Notes a version that is newer than ours, once in a while."""
        if self._newer is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            latest = self._registry.latest()
            if latest is not None and latest.weights is not None and latest.version != self._version:
                self._newer = latest

    def _load(self) -> None:
        assert self._newer is not None
        assert self._newer.weights is not None
        self._policy = load_policy(Path(self._newer.weights)).eval()
        self._version, self._newer = self._newer.version, None

    def _admit(self) -> None:
        """Gives waiting conversations the free slots, and reads their prompts; waits where nobody is here."""
        free = [slot for slot in range(_SLOTS) if slot not in self._active]
        joined = []
        while free:
            try:
                idle = not self._active
                conversation = self._waiting.get(block=idle, timeout=_LOOK_S if idle else None)
            except queue.Empty:
                break
            if conversation is not None:
                slot = free.pop()
                self._active[slot] = conversation
                joined.append(slot)
        if joined:
            self._advance(joined)

    def _advance(self, slots: list[int]) -> None:
        """Samples the next token of the conversations in `slots`: all of them old, or all of them new."""
        rows = [self._active[slot] for slot in slots]
        unread = [row.ids[-1:] or row.prompt for row in rows]
        counts = torch.tensor([len(tokens) for tokens in unread])
        read = torch.tensor([len(row.prompt) + len(row.ids) for row in rows]) - counts
        longest = int(counts.max())
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in unread])
        positions = read[:, None] + torch.arange(longest)
        logprobs = self._policy(ids, positions, cache=self._cache, slots=torch.tensor(slots))
        ahead = logprobs[torch.arange(len(rows)), counts - 1].numpy()
        for slot, row, distribution in zip(slots, rows, ahead, strict=True):
            token = _draw(distribution, row.random)
            row.ids.append(token)
            row.logprobs.append(float(distribution[token]))
            if (reason := row.finish_reason) is not None:
                del self._active[slot]
                if not row.done.cancelled():
                    row.done.set_result(Sample(row.ids, row.logprobs, reason, self._version))


def _draw(logprobs: np.ndarray, random: np.random.Generator) -> int:
    """A token drawn from the distribution with these log-probabilities."""
    cumulated = np.exp(logprobs.astype(np.float64)).cumsum()
    return int(np.searchsorted(cumulated, random.random() * cumulated[-1], side="right"))
