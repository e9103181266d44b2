"""Mode `tokens`: ids go out and come back, and a session is one sequence whatever the tokeniser says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcroll.config import ModelConfig
from hpcroll.contract import Rollout, RolloutRef, StopReason, Task
from hpcroll.gateway import Gateway, GatewaySession, Journal, read_journal
from hpcroll.testing.policy_server import Behaviour, PolicyServer, Script, ToolCall, Turn
from hpcroll.testing.tiny_tokenizer import write_tokenizer
from hpcroll.trajectory import build

PROMPT = "Count the words, naïvely."
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ENGINES = {
    "vllm": {"engine": "vllm"},
    "vllm scale-out": {"engine": "vllm", "scale_out": True},
    "sglang": {"engine": "sglang"},
}


def turns(count: int) -> tuple[Turn, ...]:
    looking = [
        Turn(
            reasoning=f"Thought {number}: 日本.",
            text=f"Step {number}.",
            tools=(ToolCall(name="look", arguments={"at": f"é {number}"}),),
        )
        for number in range(count - 1)
    ]
    return (*looking, Turn(reasoning="Enough.", text="Done. 👋"))


@asynccontextmanager
async def session_of(
    root: Path,
    *,
    engine: str = "vllm",
    script: tuple[Turn, ...] = (),
    context_tokens: int = 32_768,
    **tokens: Any,
) -> AsyncIterator[tuple[PolicyServer, GatewaySession, Journal]]:
    write_tokenizer(root / "tokenizer")
    behaviour = Behaviour(name="looks", turns=turns(4), count="requests")
    server = PolicyServer(
        [Script(prompt=PROMPT, behaviours=(behaviour,))], template="qwen3", noncanonical=1.0
    )
    async with server:
        config = ModelConfig.model_validate(
            {
                "endpoints": [server.base_url],
                "engine": engine,
                "mode": "tokens",
                "context_tokens": context_tokens,
                "call_tries": 1,
                "tokens": {"tokenizer": str(root / "tokenizer"), "renderer": "qwen3", **tokens},
            }
        )
        journal = Journal(root / "journal")
        journal.open()
        gateway = Gateway(config, journal=journal)
        await gateway.start()
        task = Task(task_id="t", handler="command", prompt=PROMPT)
        ref = RolloutRef(segment="0" * 16, ordinal=0)
        try:
            rollout = Rollout(ref=ref, task=task, sample_index=0, group_size=1)
            yield server, gateway.open_session(rollout, 1), journal
        finally:
            await gateway.close()
            await journal.close()


async def post(session: GatewaySession, messages: list[Any], *, stream: bool = False) -> Any:
    headers = {"Authorization": f"Bearer {session.outside.api_key}"}
    body = {"messages": messages, "tools": [TOOL], "stream": stream}
    url = f"{session.outside.base_url}/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as response:
        if not stream:
            return await response.json()
        text = await response.text()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(within())


@pytest.mark.parametrize("keeps_thinking", [True, False], ids=["thinking sent back", "thinking dropped"])
@pytest.mark.parametrize("engine", ENGINES)
def test_append_only_agent_leaves_one_sequence_of_what_was_sampled(
    tmp_path: Path, engine: str, keeps_thinking: bool
) -> None:
    async def scenario() -> None:
        async with session_of(tmp_path, **ENGINES[engine]) as (server, session, journal):
            messages: list[Any] = [{"role": "user", "content": PROMPT}]
            for _ in range(4):
                message = (await post(session, messages))["choices"][0]["message"]
                assert message["reasoning_content"]
                if not keeps_thinking:
                    del message["reasoning_content"]
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "seen"}
                    for call in message.get("tool_calls", ())
                ]
            assert messages[-1]["content"] == "Done. 👋"
            await session.close()
            calls = session.calls
            for call, sampled in zip(calls, server.sampled, strict=True):
                assert call.call.error is None
                assert tuple(call.tokens.prompt_ids.tolist()) == sampled.prompt_ids
                assert tuple(call.tokens.sampled_ids.tolist()) == sampled.sampled_ids
                assert tuple(call.tokens.logprobs.tolist()) == sampled.logprobs
            (segment,) = build(calls).segments
            assert sum(run.length for run in segment.policy_runs) == sum(
                len(call.tokens.sampled_ids) for call in calls
            )
            ways = [
                (call.call.rendering.how, call.call.rendering.why) for call in calls if call.call.rendering
            ]
            assert ways == [("rendered", "start"), *[("bridged", None)] * 3]
            assert [item.call for item in read_journal(journal.path)] == [call.call for call in calls]

    run(scenario)


@pytest.mark.parametrize("engine", ENGINES)
def test_stream_shows_what_the_whole_reply_says(tmp_path: Path, engine: str) -> None:
    async def scenario() -> None:
        async with session_of(tmp_path, **ENGINES[engine]) as (server, session, _):
            chunks = await post(session, [{"role": "user", "content": PROMPT}], stream=True)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Thought 0: 日本."
            assert "".join(delta.get("content") or "" for delta in deltas) == "Step 0."
            assert sum(bool(delta.get("content")) for delta in deltas) > 1
            (called,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
            assert called["function"] == {"name": "look", "arguments": '{"at": "é 0"}'}
            (call,) = session.calls
            assert tuple(call.tokens.sampled_ids.tolist()) == server.sampled[0].sampled_ids

    run(scenario)


def test_edited_reply_is_rendered_anew_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with session_of(tmp_path) as (_, session, _):
            messages: list[Any] = [{"role": "user", "content": PROMPT}]
            message = (await post(session, messages))["choices"][0]["message"]
            message["content"] = "Step zero."
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"}
            await post(session, [*messages, message, result])
            rendering = session.calls[1].call.rendering
            assert rendering is not None
            assert (rendering.how, rendering.why) == ("rendered", "reply_edited")
            assert "content" in rendering.detail
            assert len(build(session.calls).segments) == 2

    run(scenario)


def test_prompt_that_is_too_long_never_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with session_of(tmp_path, context_tokens=64) as (server, session, _):
            answer = await post(session, [{"role": "user", "content": PROMPT}])
            assert answer["error"]["code"] == "context_length_exceeded"
            assert session.limit is StopReason.CONTEXT_LIMIT
            assert server.sampled == []

    run(scenario)


def test_count_is_the_length_of_the_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with session_of(tmp_path) as (_, session, _):
            headers = {"Authorization": f"Bearer {session.outside.api_key}"}
            body = {"messages": [{"role": "user", "content": PROMPT}]}
            root = session.outside.base_url
            async with aiohttp.ClientSession(headers=headers) as client:
                async with client.post(f"{root}/messages/count_tokens", json=body) as response:
                    counted = (await response.json())["input_tokens"]
                async with client.post(f"{root}/messages", json={**body, "max_tokens": 9}) as response:
                    assert (await response.json())["usage"]["input_tokens"] == counted

    run(scenario)
