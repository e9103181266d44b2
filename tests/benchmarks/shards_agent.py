"""The conversation of one imagined agent, as token ids and as messages that say the same."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcroll.contract import Floats, Ids
from tests.benchmarks.shards_corpus import TURN_ENDS, TURN_OPENS
from tests.benchmarks.shards_repository import Repository

SAMPLED_SHARE = 0.17
"""Of a turn that is not the last, at the median; the rest is what the agent was told."""
_LONG_REPLY = 1200
_MOVES = (("view", 45), ("search", 18), ("test", 19), ("edit", 18))


@dataclass
class Line:
    """One unbroken token sequence: its parts, and which of them were sampled in which call."""

    parts: list[Ids] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Call, start, length."""
    context: list[tuple[int, int, str]] = field(default_factory=list)
    """Start, length, role."""
    size: int = 0

    def add(self, ids: Ids, role: str) -> None:
        self.context.append((self.size, len(ids), role))
        self._append(ids)

    def sample(self, call: int, ids: Ids) -> None:
        self.spans.append((call, self.size, len(ids)))
        self._append(ids)

    def _append(self, ids: Ids) -> None:
        self.parts.append(ids)
        self.size += len(ids)

    def ids(self) -> Ids:
        return np.concatenate(self.parts)


@dataclass
class Request:
    """One call: what it adds to the conversation, and the reply."""

    messages: list[dict[str, Any]]
    messages_from: int
    base: int | None
    reply: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    reply_tokens: int = 0


class Conversation:
    """An agent at work in `repository` until it has about `tokens` tokens, in 8 to 40 turns.

    `head` are the messages that every sibling begins with: (role, ids) each.
    """

    def __init__(
        self,
        repository: Repository,
        rng: random.Random,
        *,
        head: list[tuple[str, Ids]],
        habits: list[Ids],
        tokens: int,
    ) -> None:
        self._repository = repository
        self._rng = rng
        self._head = head
        self._habits = habits
        self.lines = [Line()]
        self.requests: list[Request] = []
        self.outputs: list[tuple[str, str, int]] = []
        """Of each tool call: tool, arguments, bytes of output."""
        self._messages = 0
        self._news: list[dict[str, Any]] = []
        for role, ids in head:
            self._tell(role, ids)
        turns = min(40, max(8, round((tokens - self.lines[0].size) / rng.uniform(420, 1100))))
        compacts_at = rng.randrange(12, turns) if turns > 20 and rng.random() < 0.12 else None
        for turn in range(turns):
            if turn == compacts_at:
                self._compact()
            left = max(200, (tokens - sum(line.size for line in self.lines)) // (turns - turn))
            self._turn(max(120, int(left * rng.lognormvariate(-0.1, 0.45))), last=turn == turns - 1)

    def _turn(self, budget: int, *, last: bool) -> None:
        repository, rng = self._repository, self._rng
        move = rng.choices(*zip(*_MOVES, strict=True))[0]
        said = int(budget * SAMPLED_SHARE * rng.lognormvariate(-0.15, 0.6))
        if last:
            self._reply(self._thought(said), None)
            return
        if move == "edit":
            path, old, new, output = repository.edit(rng)
            call = ("edit", {"path": path, "old_text": old, "new_text": new})
        else:
            command, output = getattr(repository, move)(rng, budget - said)
            call = ("bash", {"command": command})
        spent = self._reply(said, call)
        told = _cut(output, max(60, budget - spent))
        if move == "edit" and budget - spent > 600:  # the change is looked at too
            told = _cut([*told, *repository.view(rng, budget - spent)[1]], budget - spent)
        text = self._tell("tool", np.concatenate(told))
        self.outputs.append((call[0], json.dumps(call[1]), len(text)))

    def _reply(self, said: int | Ids, call: tuple[str, dict[str, str]] | None) -> int:
        """Adds a reply of thoughts and a call; returns its tokens."""
        repository, index = self._repository, len(self.requests)
        tail = np.empty(0, np.uint32)
        reply: dict[str, Any] = {"role": "assistant"}
        if call is not None:
            name, arguments = call
            text = json.dumps(arguments)
            tail = repository.ids(f'\n<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>')
            function = {"name": name, "arguments": text}
            number = f"call_{self._rng.randrange(1 << 96):024x}"
            reply["tool_calls"] = [{"id": number, "type": "function", "function": function}]
        thought = said if isinstance(said, np.ndarray) else self._thought(max(12, said - len(tail)))
        reply["content"] = repository.text(thought)
        line = self.lines[-1]
        opening = np.concatenate([[TURN_OPENS], repository.ids("assistant\n")]).astype(np.uint32)
        line.add(opening, "template")
        sampled = np.concatenate([thought, tail, [TURN_ENDS]]).astype(np.uint32)
        base = index - 1 if index and self._messages else None
        request = Request(self._news, self._messages if base is not None else 0, base, reply)
        request.prompt_tokens, request.reply_tokens = line.size, len(sampled)
        line.sample(index, sampled)
        line.add(repository.ids("\n"), "template")
        self.requests.append(request)
        self._messages += len(self._news) + 1
        self._news = []
        return len(sampled)

    def _thought(self, count: int) -> Ids:
        """New prose, in which the policy's own phrases for this task come back."""
        parts, size = [], 0
        count = max(12, min(count, 4 * _LONG_REPLY))
        while size < count:
            if self._rng.random() < 0.3:
                part = self._habits[min(int(self._rng.paretovariate(0.5)) - 1, len(self._habits) - 1)]
            else:
                part = self._repository.prose(self._rng, self._rng.randint(15, 60))
            parts.append(part)
            size += len(part)
        return np.concatenate(parts)[:count]

    def _tell(self, role: str, ids: Ids) -> str:
        repository = self._repository
        text = repository.text(ids)
        opening = np.concatenate([[TURN_OPENS], repository.ids(f"{role}\n")])
        closing = np.concatenate([[TURN_ENDS], repository.ids("\n")])
        self.lines[-1].add(np.concatenate([opening, ids, closing]).astype(np.uint32), role)
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "tool":
            message["tool_call_id"] = self.requests[-1].reply["tool_calls"][0]["id"]
        self._news.append(message)
        return text

    def _compact(self) -> None:
        """The history gives way to a summary: a new line of tokens that begins as the first one did."""
        self.lines.append(Line())
        self._messages, self._news = 0, []
        for role, ids in self._head:
            self._tell(role, ids)
        self._tell("user", self._thought(700))


def sampled_logprobs(rng: np.random.Generator, count: int) -> Floats:
    """Log-probabilities as a trained policy has them: most tokens are nearly certain, some are surprises.

    Float32 with every bit of the mantissa in use, which no compressor can do anything about.
    """
    kind = rng.random(count)
    others = 10 ** np.where(kind < 0.6, rng.uniform(-7, -2, count), rng.uniform(-2, 0, count))
    values = -np.log1p(others)
    surprised = kind > 0.84
    values[surprised] -= rng.exponential(1.8, int(surprised.sum()))
    return values.astype(np.float32)


def _cut(parts: list[Ids], budget: int) -> list[Ids]:
    """The first parts, at most `budget` ids but at least one part."""
    ends = np.cumsum([len(part) for part in parts])
    return parts[: max(1, int(np.searchsorted(ends, budget, side="right")))]
