"""The scripted policy server behaves like an inference server, and says that it is none."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest

from hpcroll.errors import ConfigError
from hpcroll.testing.harness_suite import until
from hpcroll.testing.policy_server import (
    Behaviour,
    PolicyServer,
    Script,
    Tokens,
    Turn,
    fails,
    garbage,
    load_scripts,
    loops,
    solves,
    stalls,
    write_scripts,
)

PROMPT = "Count the files in the directory."
SCRIPT = Script(prompt=PROMPT, behaviours=(solves(["ls", "ls | wc -l"], "3"),))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


async def post(server: PolicyServer, messages: list[Any], session: str = "s/0.1", **body: Any) -> Any:
    body = {"messages": messages, "return_token_ids": True, "logprobs": True, **body}
    url = f"{server.base_url}/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, json=body, headers={"X-Session-Id": session}) as response,
    ):
        if response.content_type == "text/event-stream":
            lines = (await response.text()).splitlines()
            return [line[6:] for line in lines if line.startswith("data: ")]
        return await response.json()


async def converse(server: PolicyServer, turns: int, session: str = "s/0.1", prompt: str = PROMPT) -> None:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(turns):
        message = (await post(server, messages, session))["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]


def test_tokens_of_any_text_decode_to_it_however_they_are_split() -> None:
    tokens, random = Tokens.load(), Random(1)
    for text in ("", "a", "def f(x):\n    return x\n", "naïve 𝄞 déjà vu 漢字 🧨", "<s>[INST]</s>", "x" * 999):
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text
        for _ in range(20):
            split = tokens.resplit(ids, random)
            assert tokens.decode(split) == text
            assert (split != ids) == any(len(tokens.piece(token_id)) > 1 for token_id in ids)


def test_sampled_log_holds_exactly_what_was_answered() -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT], version=4) as server:
            reply = await post(server, [{"role": "user", "content": PROMPT}])
            (sampled,) = server.sampled
            choice = reply["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert reply["prompt_token_ids"] == list(sampled.prompt_ids)
            assert choice["token_ids"] == list(sampled.sampled_ids)
            assert logprobs == list(sampled.logprobs)
            assert all(value < 0 and math.isfinite(value) for value in logprobs)
            assert all(float(np.float32(value)) == value for value in logprobs)
            assert (reply["weight_version"], sampled.version) == ("4", 4)
            assert reply["usage"]["completion_tokens"] == len(sampled.sampled_ids)

    run(scenario)


def test_streamed_reply_holds_the_same_tokens_and_text() -> None:
    async def scenario() -> None:
        turn = Turn(text="naïve 𝄞 text", tools=solves(["ls"], "x").turns[0].tools)
        script = Script(prompt=PROMPT, behaviours=(Behaviour(name="b", turns=(turn,)),))
        async with PolicyServer([script], noncanonical=1.0) as server:
            *events, done = await post(server, [{"role": "user", "content": PROMPT}], stream=True)
            assert done == "[DONE]"
            chunks = [json.loads(event) for event in events]
            choices = [chunk["choices"][0] for chunk in chunks]
            (sampled,) = server.sampled
            assert chunks[0]["prompt_token_ids"] == list(sampled.prompt_ids)
            ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
            assert ids == list(sampled.sampled_ids)
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == "naïve 𝄞 text"
            assert choices[-1]["finish_reason"] == "tool_calls"

    run(scenario)


def test_at_least_a_quarter_of_replies_do_not_encode_to_what_was_sampled() -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT]) as server:
            for rollout in range(20):
                await converse(server, 3, f"s/{rollout}.1")
            odd = [sampled for sampled in server.sampled if not sampled.canonical]
            assert len(odd) / len(server.sampled) >= 0.25
            tokens = server.tokens
            for sampled in odd:
                text = tokens.decode(sampled.sampled_ids)
                assert len(sampled.sampled_ids) > len([*tokens.encode(text)])

    run(scenario)


def continues(server: PolicyServer) -> list[bool]:
    pairs = zip(server.sampled, server.sampled[1:], strict=False)
    return [
        after.prompt_ids[: len(before.prompt_ids) + len(before.sampled_ids)]
        == before.prompt_ids + before.sampled_ids
        for before, after in pairs
    ]


def test_next_prompt_extends_the_sample_only_where_text_encodes_to_it_or_ids_are_remembered() -> None:
    async def scenario() -> None:
        for remember, noncanonical, expected in ((False, 1.0, False), (False, 0.0, True), (True, 1.0, True)):
            async with PolicyServer([SCRIPT], remember=remember, noncanonical=noncanonical) as server:
                await converse(server, 3)
                assert continues(server) == [expected, expected]

    run(scenario)


def test_ids_are_remembered_for_their_own_session_only() -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT], remember=True, noncanonical=1.0) as server:
            await converse(server, 2, "s/0.1")
            await converse(server, 2, "s/1.1")
            first, _, second, last = server.sampled
            assert first.prompt_ids == second.prompt_ids
            assert first.sampled_ids != second.sampled_ids
            start = len(second.prompt_ids)
            assert last.prompt_ids[start : start + len(second.sampled_ids)] == second.sampled_ids

    run(scenario)


def test_behaviour_is_the_same_in_every_attempt_and_follows_the_weights() -> None:
    async def scenario() -> None:
        behaviours = (solves([], "1", weight=3.0), fails([], weight=1.0), loops(weight=0.0))
        async with PolicyServer([Script(prompt=PROMPT, behaviours=behaviours)], seed=5) as server:
            for rollout in range(60):
                for attempt in (1, 2):
                    await converse(server, 1, f"s/{rollout}.{attempt}")
            names = [sampled.behaviour for sampled in server.sampled]
            assert names[::2] == names[1::2]
            counts = Counter(names[::2])
            assert set(counts) == {"solves", "fails"}
            assert counts["solves"] > counts["fails"] > 3

    run(scenario)


def test_longest_contained_prompt_decides_and_an_unknown_task_gets_an_empty_answer() -> None:
    async def scenario() -> None:
        longer = Script(prompt=f"{PROMPT} All of them.", behaviours=(fails(),))
        async with PolicyServer([SCRIPT, longer]) as server:
            await converse(server, 1, prompt=f"Task: {PROMPT} All of them. Go.")
            await converse(server, 1, prompt=f"Task: {PROMPT}")
            reply = await post(server, [{"role": "user", "content": "something else"}])
            assert [s.behaviour for s in server.sampled] == ["fails", "solves", "unknown_task"]
            (call,) = reply["choices"][0]["message"]["tool_calls"]
            assert (call["function"]["name"], call["function"]["arguments"]) == ("submit", '{"answer": ""}')

    run(scenario)


def test_limits_of_length_are_those_of_a_real_server() -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT], context_tokens=100) as server:
            ask = [{"role": "user", "content": PROMPT}]
            reply = await post(server, ask, max_tokens=4)
            assert reply["choices"][0]["finish_reason"] == "length"
            assert len(reply["choices"][0]["token_ids"]) == 4
            refused = await post(server, ask, max_tokens=99)
            assert "maximum context length is 100 tokens" in refused["error"]["message"]

    run(scenario)


def test_stalling_reply_ends_with_its_client() -> None:
    async def scenario() -> None:
        async with PolicyServer([Script(prompt=PROMPT, behaviours=(stalls(3600.0),))]) as server:
            waiting = asyncio.ensure_future(converse(server, 1))
            await until(lambda: server.waiting == 1)
            waiting.cancel()
            await until(lambda: server.waiting == 0)
            assert server.sampled == []

    run(scenario)


def test_unreadable_requests_are_refused() -> None:
    async def scenario() -> None:
        async with PolicyServer([SCRIPT]) as server:
            for messages in ([{"role": "wizard", "content": "x"}], [{"content": "x"}], ["x"], None):
                assert (await post(server, messages))["error"]["code"] == 400  # type: ignore[arg-type]

    run(scenario)


def test_server_says_that_it_is_scripted() -> None:
    async def scenario() -> None:
        async with PolicyServer() as server, aiohttp.ClientSession() as client:
            for path in ("/health", "/v1/models"):
                async with client.get(f"{server.base_url}{path}") as response:
                    assert "scripted" in await response.text()

    run(scenario)


def test_script_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    scripts = (SCRIPT, Script(prompt="x", behaviours=(garbage(), stalls(1.0), loops())))
    write_scripts(scripts, tmp_path / "s.jsonl")
    assert load_scripts(tmp_path / "s.jsonl") == scripts


def test_broken_script_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f'{SCRIPT.model_dump_json()}\n\n{{"prompt": "x", "behaviour": []}}\n')
    with pytest.raises(ConfigError, match=r"line 3: behaviour"):
        load_scripts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scripts(tmp_path / "absent.jsonl")


def test_server_runs_as_a_process_until_it_is_told_to_stop(tmp_path: Path) -> None:
    write_scripts([SCRIPT], tmp_path / "s.jsonl")
    port_file, log = tmp_path / "port", tmp_path / "log.jsonl"
    argv = [sys.executable, "-m", "hpcroll.testing.policy_server", "--scripts", str(tmp_path / "s.jsonl")]
    argv += ["--port-file", str(port_file), "--version", "7", "--log", str(log)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    async def scenario() -> None:
        await until(lambda: port_file.exists() or process.poll() is not None)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        async with aiohttp.ClientSession() as client:
            body = {"messages": [{"role": "user", "content": PROMPT}]}
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.headers["X-Policy-Version"] == "7"
            async with client.post(f"{url}/scripted/version", json={"version": 8}) as response:
                assert await response.json() == {"version": 8}

    try:
        run(scenario)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    assert "scripted" in output
    assert json.loads(log.read_text())["behaviour"] == "solves"


def test_unusable_script_file_ends_the_process_with_status_2(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hpcroll.testing.policy_server", "--scripts", str(tmp_path / "absent")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "absent" in done.stderr
