"""The scripted policy server's endpoints say what was sampled, each as the engine that it speaks like."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unicodedata import normalize

import aiohttp
import numpy as np
import pytest
from renderers.qwen3 import Qwen3Renderer

from hpcroll.errors import ConfigError
from hpcroll.testing.policy_server import PolicyServer, Sampled, Turn
from hpcroll.testing.policy_server.deltas import deltas
from hpcroll.testing.policy_server.reply import Reply, make_reply
from hpcroll.testing.tiny_tokenizer import tiny_tokenizer
from tests.policy_client import BASH, PROMPT, WIRES, ask, bash, request_body, run, script, tokens_of, user

TEXT = "naïve 𝄞 👩‍💻 漢字 e\u0301 שלום"
TURN = Turn(
    text=f"Look: {TEXT}.", reasoning=f"Hm, {TEXT}?\nYes.", tools=(bash(f"echo '{TEXT}'"), bash("pwd"))
)
TEMPLATES = ("tekken", "qwen3")


@asynccontextmanager
async def serve(*turns: Turn, template: str = "qwen3", **options: Any) -> AsyncIterator[PolicyServer]:
    async with PolicyServer([script(*turns)], template=template, **options) as server:
        yield server


def shown(events: list[Any], field: str) -> str:
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_ids_and_logprobs_are_those_of_the_log(wire: str, stream: bool, template: str) -> None:
    async def scenario() -> None:
        async with serve(TURN, template=template, noncanonical=0.5, version=4) as server:
            for place in range(4):
                messages = [user(PROMPT), user(str(place))]
                answer = await ask(server, messages, wire=wire, tools=[BASH], stream=stream)
                answers = answer if stream else [answer]
                sampled = server.sampled[-1]
                assert tokens_of(wire, answers) == (list(sampled.sampled_ids), list(sampled.logprobs))
                assert all(float(np.float32(value)) == value < 0 for value in sampled.logprobs)
                assert math.isfinite(sum(sampled.logprobs))
                assert sampled.wire == wire
                assert (sampled.ended, sampled.sent) == ("done", len(sampled.sampled_ids))
                assert all('"weight_version": "4"' in json.dumps(answer) for answer in answers)
                assert (sampled.version, sampled.version_end) == (4, 4)

    run(scenario)


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_ids_of_the_log_are_what_was_rendered_or_sent(template: str) -> None:
    async def scenario() -> None:
        async with serve(TURN, template=template) as server:
            for wire in WIRES:
                reply = await ask(server, [user(PROMPT)], wire=wire, tools=[BASH])
                if wire == "chat":
                    assert reply["prompt_token_ids"] == list(server.sampled[0].prompt_ids)
                if wire == "completions":
                    assert reply["choices"][0]["prompt_token_ids"] == list(server.sampled[0].prompt_ids)
            body = request_body(server, "completions", [user(PROMPT)], tools=[BASH])
            assert {sampled.prompt_ids for sampled in server.sampled} == {tuple(body["prompt"])}

    run(scenario)


@pytest.mark.parametrize("noncanonical", [0.0, 1.0])
@pytest.mark.parametrize("bytewise", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_streamed_message_is_the_whole_message(template: str, bytewise: bool, noncanonical: float) -> None:
    async def scenario() -> None:
        turn = TURN.model_copy(update={"bytewise": bytewise})
        async with serve(turn, template=template, noncanonical=noncanonical) as server:
            whole = await ask(server, [user(PROMPT)], tools=[BASH])
            events = await ask(server, [user(PROMPT)], tools=[BASH], stream=True)
            message = whole["choices"][0]["message"]
            assert shown(events, "content") == message["content"]
            assert shown(events, "reasoning_content") == message.get("reasoning_content", "")
            assert normalize("NFC", message["content"]) == normalize("NFC", TURN.text)
            calls: dict[int, list[str]] = {}
            for event in events:
                for piece in event["choices"][0]["delta"].get("tool_calls") or () if event["choices"] else ():
                    calls.setdefault(piece["index"], []).append(piece["function"]["arguments"])
            assert ["".join(pieces) for pieces in calls.values()] == [
                call["function"]["arguments"] for call in message["tool_calls"]
            ]
            assert all(len([piece for piece in pieces if piece]) > 1 for pieces in calls.values())

    run(scenario)


@pytest.mark.parametrize("template", TEMPLATES)
def test_bytewise_turn_lets_every_character_beyond_ascii_fall_across_tokens(template: str) -> None:
    async def scenario() -> None:
        turn = TURN.model_copy(update={"bytewise": True})
        async with serve(turn, template=template) as server:
            await ask(server, [user(PROMPT)], tools=[BASH])
            piece, (sampled,) = server.template.vocabulary.piece, server.sampled
            pieces = [piece(token_id) for token_id in sampled.sampled_ids]
            assert all(len(found) == 1 for found in pieces if any(byte > 0x7F for byte in found))
            assert "漢字".encode() in b"".join(pieces)

    run(scenario)


@pytest.mark.parametrize("bytewise", [False, True])
def test_bytewise_turn_lets_characters_fall_across_chunks_of_the_connection(bytewise: bool) -> None:
    async def scenario() -> None:
        async with serve(TURN.model_copy(update={"bytewise": bytewise})) as server:
            body = {**request_body(server, "chat", [user(PROMPT)], tools=[BASH]), "stream": True}
            url, chunks, chunk = f"{server.base_url}/v1/chat/completions", [], b""
            async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
                async for data, ends in response.content.iter_chunks():
                    chunk += data
                    if ends:
                        chunks.append(chunk)
                        chunk = b""
            assert "漢字" in b"".join(chunks).decode()
            assert any(not _is_utf8(chunk) for chunk in chunks) is bytewise

    run(scenario)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_qwen3_ids_parse_to_the_message_that_chat_shows() -> None:
    async def scenario() -> None:
        renderer = Qwen3Renderer(tiny_tokenizer())
        async with serve(TURN, noncanonical=0.5) as server:
            for place in range(6):
                reply = await ask(server, [user(PROMPT), user(str(place))], tools=[BASH])
                message = reply["choices"][0]["message"]
                parsed = renderer.parse_response(list(server.sampled[-1].sampled_ids))
                assert parsed.content.strip("\n") == message["content"]
                assert (parsed.reasoning_content or "").strip("\n") == message["reasoning_content"]
                assert [(call.name, call.arguments) for call in parsed.tool_calls] == [
                    (call["function"]["name"], json.loads(call["function"]["arguments"]))
                    for call in message["tool_calls"]
                ]

    run(scenario)


def test_quarter_of_an_agents_replies_is_not_what_their_text_encodes_to() -> None:
    async def scenario() -> None:
        async with serve(TURN) as server:
            for place in range(100):
                await ask(server, [user(PROMPT), user(str(place))], tools=[BASH], wire="sglang_generate")
            tokens = tiny_tokenizer()
            for sampled in server.sampled:
                again = tokens.encode(tokens.decode(sampled.sampled_ids))
                assert sampled.canonical == (again == list(sampled.sampled_ids))
            odd = sum(not sampled.canonical for sampled in server.sampled)
            assert 0.15 < odd / 100 < 0.4

    run(scenario)


def continuation(before: Sampled, after: Sampled) -> bool:
    sequence = before.prompt_ids + before.sampled_ids
    return after.prompt_ids[: len(sequence)] == sequence


def test_qwen3_keeps_thinking_while_tools_are_called_and_strips_it_after_the_next_question() -> None:
    async def scenario() -> None:
        async with serve(TURN, TURN, noncanonical=0.0) as server:
            messages: list[Any] = [user(PROMPT)]
            for following in ({"role": "tool", "content": "ok"}, user("And now?"), user("x")):
                message = (await ask(server, messages, tools=[BASH]))["choices"][0]["message"]
                messages += [message, following]
            first, second, third = server.sampled
            assert continuation(first, second)
            assert not continuation(second, third)
            think = tiny_tokenizer().convert_tokens_to_ids("<think>")
            assert [sampled.prompt_ids.count(think) for sampled in server.sampled] == [0, 1, 0]

    run(scenario)


def test_native_stream_holds_all_so_far_unless_the_server_streams_incrementally() -> None:
    async def scenario() -> None:
        for incremental in (False, True):
            async with serve(TURN, incremental=incremental) as server:
                events = await ask(server, [user(PROMPT)], tools=[BASH], wire="sglang_generate", stream=True)
                (sampled,) = server.sampled
                found = tokens_of("sglang_generate", events, incremental=incremental)
                assert found == (list(sampled.sampled_ids), list(sampled.logprobs))
                lengths = [len(event["output_ids"]) for event in events]
                assert lengths == [1] * len(events) if incremental else list(range(1, len(events) + 1))
                assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * len(
                    events[:-1]
                )
                assert events[-1]["meta_info"]["finish_reason"] == {
                    "type": "stop",
                    "matched": sampled.sampled_ids[-1],
                }

    run(scenario)


@pytest.mark.parametrize(
    ("wire", "most"), [("chat", None), ("completions", 16), ("vllm_generate", None), ("sglang_generate", 128)]
)
def test_reply_without_a_limit_is_as_long_as_each_engine_lets_it(wire: str, most: int | None) -> None:
    async def scenario() -> None:
        long = Turn(text="many words " * 200)
        async with serve(long) as server:
            await ask(server, [user(PROMPT)], wire=wire, max_tokens=None)
            (sampled,) = server.sampled
            assert sampled.finish_reason == ("length" if most else "stop")
            assert len(sampled.sampled_ids) == most if most else len(sampled.sampled_ids) > 200

    run(scenario)


@pytest.mark.parametrize("name", TEMPLATES)
def test_reply_may_be_cut_anywhere_and_shows_its_calls_as_text(name: str) -> None:
    template = PolicyServer(template=name).template

    def cut(most: int) -> Reply:
        return make_reply(TURN, template, seed=1, identity=("r",), noncanonical=1.0, max_tokens=most)

    whole = cut(10_000)
    for most in range(1, len(whole.ids)):
        reply = cut(most)
        assert (reply.ids, reply.finish_reason) == (whole.ids[:most], "length")
        assert "tool_calls" not in reply.message()
        pieces = list(deltas(reply, template.vocabulary, strips_newlines=template.strips_newlines))
        assert [stop for _, _, stop in pieces][-1] == most
        assert [start for _, start, _ in pieces] == [0, *(stop for _, _, stop in pieces[:-1])]
        assert "".join(delta.get("content", "") for delta, _, _ in pieces) == reply.text
        assert "".join(delta.get("reasoning_content", "") for delta, _, _ in pieces) == reply.reasoning
    assert [call["function"]["name"] for call in whole.tool_calls] == ["bash", "bash"]


@pytest.mark.parametrize("wire", WIRES)
def test_prompt_beyond_the_context_is_refused_and_advances_nothing(wire: str) -> None:
    async def scenario() -> None:
        async with serve(TURN, Turn(text="Two."), context_tokens=300) as server:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await ask(server, [user(f"{PROMPT} {'x y ' * 400}")], wire=wire, tools=[BASH])
            assert (caught.value.status, server.sampled, server.refused) == (400, [], 1)
            await ask(server, [user(PROMPT)], wire=wire, tools=[BASH], max_tokens=20)
            assert [sampled.turn for sampled in server.sampled] == [0]

    run(scenario)


def test_prompt_that_is_no_list_of_ids_is_refused() -> None:
    async def scenario() -> None:
        bodies = [
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": []}),
            ("/inference/v1/generate", {"token_ids": [1]}),
            ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}),
            ("/generate", {"input_ids": [[1]]}),
        ]
        async with serve(TURN) as server, aiohttp.ClientSession() as client:
            for path, body in bodies:
                async with client.post(server.base_url + path, json=body) as response:
                    assert response.status == 400, (path, body)

    run(scenario)


def test_usage_that_a_turn_states_is_said() -> None:
    async def scenario() -> None:
        usage = {"prompt_tokens": 90_000, "prompt_tokens_details": {"cached_tokens": 5}}
        async with serve(Turn(text="Done.", usage=usage)) as server:
            said = (await ask(server, [user(PROMPT)], tools=[BASH]))["usage"]
            assert {name: said[name] for name in usage} == usage
            assert said["completion_tokens"] == len(server.sampled[0].sampled_ids)

    run(scenario)


def test_template_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigError, match="no template 'llama'"):
        PolicyServer(template="llama")
    with pytest.raises(ConfigError, match="remembers nothing"):
        PolicyServer(template="qwen3", remember=True)
