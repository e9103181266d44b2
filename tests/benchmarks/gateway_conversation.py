"""The gateway benchmark's conversation: requests as an agent sends them, replies as vLLM streams them.

Everything is made once from a seed: `TURNS` requests that grow from 2.4 to 5.9 thousand tokens (a word is a
token), each answered with `REPLY_TOKENS` tokens, text first and a tool call after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

TURNS = 12
TEXT_TOKENS = 40
CALL_TOKENS = 24
REPLY_TOKENS = TEXT_TOKENS + CALL_TOKENS
MODEL = "policy"
FIRST_WORD = "Certainly"
"""Begins every reply and stands nowhere else, so that the first token can be seen to arrive."""

_SEED = 20
_VOCABULARY = 150_000
_SYSTEM_WORDS, _TOOL_WORDS, _TASK_WORDS, _RESULT_WORDS = 1000, 120, 600, 250
_TOOLS = ("bash", "read_file", "write_file", "edit_file", "search", "finish")


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the conversation."""

    request: bytes
    """Body of the `POST /v1/chat/completions`."""
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    text: str
    arguments: str
    """Of the reply's tool call."""
    events: tuple[bytes, ...]
    """The server-sent events, one for each token; the first and the last carry what stands around them."""


@cache
def conversation() -> tuple[Turn, ...]:
    """All turns; equal in every process."""
    random = Random(_SEED)
    tools = [_tool(name, random) for name in _TOOLS]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _words(random, _SYSTEM_WORDS)},
        {"role": "user", "content": _words(random, _TASK_WORDS)},
    ]
    prompt = _ids(random, _SYSTEM_WORDS + _TASK_WORDS + len(_TOOLS) * _TOOL_WORDS)
    turns = []
    for index in range(TURNS):
        sampled = _ids(random, REPLY_TOKENS)
        text = [FIRST_WORD, *(f" {word}" for word in _words(random, TEXT_TOKENS - 1).split())]
        call = ['{"command": "', *(f"{word} " for word in _words(random, CALL_TOKENS - 2).split()), '"}']
        body = {"model": MODEL, "messages": messages, "tools": tools, "temperature": 1.0, "stream": True}
        turns.append(
            Turn(
                request=json.dumps({**body, "stream_options": {"include_usage": True}}).encode(),
                prompt_ids=tuple(prompt),
                sampled_ids=tuple(sampled),
                text="".join(text),
                arguments="".join(call),
                events=_events(index, prompt, sampled, text, call),
            )
        )
        function = {"name": _TOOLS[0], "arguments": "".join(call)}
        calls = [{"id": _call_id(index), "type": "function", "function": function}]
        result = _words(random, _RESULT_WORDS)
        messages.append({"role": "assistant", "content": "".join(text), "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": _call_id(index), "content": result})
        prompt = [*prompt, *sampled, *_ids(random, _RESULT_WORDS)]
    return tuple(turns)


def turn_of(request: bytes) -> int:
    """Which turn a request's body asks for, told by its number of messages."""
    return (request.count(b'"role"') - 2) // 2


def check_reply(turn: Turn, stream: bytes) -> None:
    """Raises `ValueError` where a streamed reply, in chat completions' shape, is not the one of `turn`."""
    text, arguments, reason = "", "", None
    lines = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    if not lines or lines.pop() != b"[DONE]":
        raise ValueError(f"a reply is not whole: ...{stream[-200:]!r}")
    for chunk in map(json.loads, lines):
        for choice in chunk.get("choices") or ():
            delta = choice["delta"]
            text += delta.get("content") or ""
            arguments += "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
            reason = choice.get("finish_reason") or reason
    if (text, arguments, reason) != (turn.text, turn.arguments, "tool_calls"):
        raise ValueError(f"a reply is another than the one that was sampled: {text!r} {arguments!r} {reason}")


def _words(random: Random, count: int) -> str:
    letters = "etaoinshrdlu"
    return " ".join("".join(random.choices(letters, k=random.randint(3, 6))) for _ in range(count))


def _ids(random: Random, count: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(count)]


def _tool(name: str, random: Random) -> dict[str, Any]:
    argument = {"type": "string", "description": _words(random, _TOOL_WORDS // 2)}
    parameters = {"type": "object", "properties": {"command": argument}, "required": ["command"]}
    description = _words(random, _TOOL_WORDS // 2)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _call_id(index: int) -> str:
    return f"chatcmpl-tool-{index:032x}"


def _events(
    index: int, prompt: list[int], sampled: list[int], text: list[str], call: list[str]
) -> tuple[bytes, ...]:
    def event(**fields: Any) -> bytes:
        chunk = {"id": f"chatcmpl-{index:032x}", "object": "chat.completion.chunk", "created": 1_790_000_000}
        data = json.dumps({**chunk, "model": MODEL, **fields}, separators=(",", ":"))
        return f"data: {data}\n\n".encode()

    def choice(delta: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **fields}]

    first = event(choices=choice({"role": "assistant", "content": ""}), prompt_token_ids=prompt)
    events = []
    for place, (token_id, piece) in enumerate(zip(sampled, [*text, *call], strict=True)):
        delta: dict[str, Any] = {"content": piece}
        if place >= TEXT_TOKENS:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        if place == TEXT_TOKENS:
            delta["tool_calls"][0] |= {"id": _call_id(index), "type": "function"}
            delta["tool_calls"][0]["function"]["name"] = _TOOLS[0]
        logprob = {"token": piece, "logprob": -(1 + place) / 70, "bytes": [*piece.encode()]}
        logprobs = {"content": [{**logprob, "top_logprobs": []}]}
        reason = "tool_calls" if place + 1 == REPLY_TOKENS else None
        events.append(
            event(choices=choice(delta, logprobs=logprobs, finish_reason=reason, token_ids=[token_id]))
        )
    usage = {"prompt_tokens": len(prompt), "completion_tokens": REPLY_TOKENS}
    last = event(choices=[], usage={**usage, "total_tokens": len(prompt) + REPLY_TOKENS})
    events[0] = first + events[0]
    events[-1] += last + b"data: [DONE]\n\n"
    return tuple(events)
