"""Talks to a scripted policy server as agents and gateways do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from hpcroll.testing.policy_server import Behaviour, PolicyServer, Script, ToolCall, Turn

PROMPT = "Count the files in the directory."
BASH = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {}}}
WIRES = ("chat", "completions", "vllm_generate", "sglang_generate")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "vllm_generate": "/inference/v1/generate",
    "sglang_generate": "/generate",
}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


def script(*turns: Turn, prompt: str = PROMPT, **fields: Any) -> Script:
    """One behaviour that counts requests."""
    fields = {"name": "agent", "count": "requests", **fields}
    return Script(prompt=prompt, behaviours=(Behaviour(turns=turns, **fields),))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def request_body(
    server: PolicyServer,
    wire: str,
    messages: list[Any],
    *,
    tools: list[Any] | None,
    session: str = "r/0.1",
    max_tokens: int | None = 2000,
) -> dict[str, Any]:
    """`messages` as a request of `wire`; ids are rendered here, as a gateway does."""
    chat = {"messages": messages, **({"tools": tools} if tools else {})}
    if wire == "chat":
        body = {**chat, "return_token_ids": True, "logprobs": True}
        return body if max_tokens is None else {**body, "max_tokens": max_tokens}
    ids = server.template.render_prompt(chat, session=session)
    if wire == "completions":
        body = {"prompt": ids, "logprobs": 0, "return_token_ids": True}
        return body if max_tokens is None else {**body, "max_tokens": max_tokens}
    if wire == "vllm_generate":
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return {"token_ids": ids, "sampling_params": {"logprobs": 0, **limit}}
    limit = {} if max_tokens is None else {"max_new_tokens": max_tokens}
    return {"input_ids": ids, "sampling_params": limit, "return_logprob": True}


async def ask(
    server: PolicyServer,
    messages: list[Any],
    *,
    wire: str = "chat",
    tools: list[Any] | None = None,
    session: str = "r/0.1",
    stream: bool = False,
    max_tokens: int | None = 2000,
) -> Any:
    """The JSON of a reply, or its events without `[DONE]`; raises `aiohttp.ClientResponseError`."""
    body = request_body(server, wire, messages, tools=tools, session=session, max_tokens=max_tokens)
    how = {"stream": True, "stream_options": {"include_usage": True}} if stream else {"stream": False}
    url, headers = server.base_url + PATHS[wire], {"X-Session-Id": session}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        client.post(url, json={**body, **how}, headers=headers) as response,
    ):
        if not stream:
            return json.loads(await response.read())
        lines = (await response.text()).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def tokens_of(wire: str, answers: list[Any], *, incremental: bool = False) -> tuple[list[int], list[float]]:
    """The ids and log-probabilities of a reply: its body alone, or all its events."""
    ids: list[int] = []
    logprobs: list[float] = []
    if wire == "sglang_generate":
        for answer in answers if incremental else answers[-1:]:
            ids += answer["output_ids"]
            logprobs += [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
        return ids, logprobs
    for choice in (choice for answer in answers for choice in answer["choices"]):
        ids += choice.get("token_ids") or []
        found = choice.get("logprobs") or {}
        logprobs += found.get("token_logprobs") or [entry["logprob"] for entry in found.get("content", ())]
    return ids, logprobs
