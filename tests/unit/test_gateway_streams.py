"""A stream's pieces go on as they came: together where they came so, and held where an agent may act."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from hpcroll.config import ModelConfig
from hpcroll.contract import Rollout, RolloutRef, Task
from hpcroll.gateway import Gateway, Journal
from hpcroll.gateway.sse import events

PATIENCE_S = 60
STREAM = (
    b'data: {"a":1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n'
    b": a comment\n\ndata: na\xc3\xafve\n\ndata: cut"
)
DATA = [b'{"a":1}', b"two\nlines", b"na\xc3\xafve"]


async def read(chunks: Sequence[bytes]) -> list[list[bytes]]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [batch async for batch in events(source())]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_events_are_the_same_wherever_the_network_cuts(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in itertools.pairwise(places)]
    batches = asyncio.run(read(chunks))
    assert [data for batch in batches for data in batch] == DATA
    assert all(batches)


def test_events_that_came_in_one_chunk_are_one_batch() -> None:
    assert asyncio.run(read([STREAM])) == [DATA]
    assert asyncio.run(read([b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"])) == [[b"1"], [b"2", b"3"]]


def piece(delta: dict[str, Any], token: int, **fields: Any) -> bytes:
    logprobs = {"content": [{"logprob": -0.5}]}
    choice = {"index": 0, "delta": delta, "token_ids": [token], "logprobs": logprobs, **fields}
    return b"data: " + json.dumps({"choices": [choice], "prompt_token_ids": [1, 2]}).encode() + b"\n\n"


def tool_call(name: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "id": "c", "function": {"name": name, "arguments": "{}"}}]}


def test_text_goes_out_at_once_and_together_but_the_tool_call_beside_it_waits(tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        texts = [piece({"content": word}, number) for number, word in enumerate(("I ", "run ", "it."))]
        await response.write(b"".join((*texts, piece(tool_call("bash"), 3))))
        await seen.wait()  # the rest is sampled once the agent has the text
        await response.write(piece({}, 4, finish_reason="tool_calls") + b"data: [DONE]\n\n")
        return response

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        journal = Journal(tmp_path / "journal")
        journal.open()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        gate = Gateway(ModelConfig(endpoints=(url,)), journal=journal)
        await gate.start()
        try:
            await agent(gate)
        finally:
            await gate.close()
            await journal.close()
            await runner.cleanup()

    async def agent(gate: Gateway) -> None:
        task = Task(task_id="t", handler="command", prompt="Run it.")
        ref = RolloutRef(segment="0" * 16, ordinal=0)
        session = gate.open_session(Rollout(ref=ref, task=task, sample_index=0, group_size=1), 1)
        body = {"messages": [{"role": "user", "content": "Run it."}], "stream": True}
        headers = {"Authorization": f"Bearer {session.outside.api_key}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"{session.outside.base_url}/chat/completions", json=body, headers=headers
            ) as response,
        ):
            parts: list[bytes] = [b""]
            async for data, ends in response.content.iter_chunks():
                parts[-1] += data
                if b"it." in parts[0]:
                    seen.set()
                if ends:
                    parts.append(b"")
        first, last = (part for part in parts if part)
        assert all(word in first for word in (b"I ", b"run ", b"it."))
        assert b"bash" not in first
        assert b"bash" in last
        assert session.calls[0].tokens.sampled_ids.tolist() == [0, 1, 2, 3, 4]

    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(within())
