"""Engines that are given ids: what they are asked, and what is read of their replies."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from pydantic_core import from_json

from hpcroll.contract import Sampling, VersionSpan
from hpcroll.gateway.chat import ChatRequest, MessageBuilder
from hpcroll.gateway.engines.base import Engine, Part, Question
from hpcroll.gateway.engines.sglang_generate import SglangGenerate
from hpcroll.gateway.engines.vllm_completions import VllmCompletions
from hpcroll.gateway.engines.vllm_generate import VllmGenerate
from hpcroll.gateway.reply import ReplyReader
from hpcroll.gateway.sse import events
from hpcroll.gateway.tokens import How, TokenConversation, TokenRenderer
from hpcroll.testing.policy_server import PolicyServer, Turn
from hpcroll.testing.tiny_tokenizer import write_tokenizer
from tests.policy_client import BASH, PROMPT, bash, run, script, user

SAMPLING = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.1,
    repetition_penalty=1.1,
    seed=7,
    max_tokens=99,
    stop=("END",),
)
ENGINES: tuple[type[Engine], ...] = (VllmGenerate, VllmCompletions, SglangGenerate)


def question(stream: bool = False, **constraints: Any) -> Question:
    request = ChatRequest((user(PROMPT),), stream=stream, constraints=constraints)
    return Question(request, SAMPLING, np.array([1, 2, 3], np.uint32), stop_ids=(8, 9))


def body_of(engine: type[Engine], asked: Question) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(engine().body(asked, model="m"))
    return body


def test_each_engine_is_sent_the_ids_and_the_sampling_in_its_own_words() -> None:
    common = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    common |= {"stop": ["END"], "stop_token_ids": [8, 9], "skip_special_tokens": False}
    generate = body_of(VllmGenerate, question(stream=True))
    assert generate == {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_params": {**common, "max_tokens": 99, "seed": 7, "logprobs": 0},
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert body_of(VllmCompletions, question()) == {
        **common,
        "max_tokens": 99,
        "seed": 7,
        "model": "m",
        "prompt": [1, 2, 3],
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }
    assert body_of(SglangGenerate, question()) == {
        "input_ids": [1, 2, 3],
        "sampling_params": {**common, "max_new_tokens": 99, "sampling_seed": 7, "no_stop_trim": True},
        "return_logprob": True,
        "stream": False,
    }


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("constraint", "vllm", "sglang"),
    [
        (
            {"response_format": FORM},
            {"json": SCHEMA},
            {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))},
        ),
        (
            {"response_format": {"type": "json_object"}},
            {"json_object": True},
            {"json_schema": '{"type":"object"}'},
        ),
        ({"guided_regex": "a+"}, {"regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": "root"}, {"grammar": "root"}, {"ebnf": "root"}),
        ({"tool_choice": "required"}, None, {}),
    ],
)
def test_constraints_are_translated(
    constraint: dict[str, Any], vllm: dict[str, Any] | None, sglang: dict[str, Any]
) -> None:
    asked = question(**constraint)
    assert body_of(VllmGenerate, asked)["sampling_params"].get("structured_outputs") == vllm
    assert body_of(VllmCompletions, asked).get("structured_outputs") == vllm
    params = body_of(SglangGenerate, asked)["sampling_params"]
    assert {name: params[name] for name in ("json_schema", "regex", "ebnf") if name in params} == sglang


def test_a_logit_bias_reaches_each_engine() -> None:
    asked = question(logit_bias={"5": -100})
    assert body_of(VllmGenerate, asked)["sampling_params"]["logit_bias"] == {"5": -100}
    assert body_of(VllmCompletions, asked)["logit_bias"] == {"5": -100}
    assert body_of(SglangGenerate, asked)["sampling_params"]["logit_bias"] == {"5": -100}


def read(engine: Engine, pieces: list[Any], *, stream: bool) -> tuple[ReplyReader, list[Part]]:
    reading, reader, parts = engine.reading(stream=stream), ReplyReader(), []
    for piece in pieces:
        parts.append(reading.take(piece))
        reader.take(parts[-1])
    return reader, parts


def test_vllm_says_which_weights_sampled_which_id() -> None:
    # As vLLM 0.32 streams it: the spans come with the finish reason.
    def piece(token: int, **more: Any) -> dict[str, Any]:
        entry = {"token_id": token, "logprob": -1.5, "rank": 1, "top_logprobs": []}
        choice = {"index": 0, "token_ids": [token], "logprobs": {"content": [entry]}, "finish_reason": None}
        return {"request_id": "r", "usage": None, "choices": [{**choice, "weight_versions": None, **more}]}

    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]
    usage = {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}
    reader, parts = read(
        VllmGenerate(),
        [
            {**piece(5), "prompt_token_ids": [1, 2]},
            piece(6),
            piece(7, finish_reason="stop", weight_versions=spans),
            {"request_id": "r", "usage": usage, "choices": []},
        ],
        stream=True,
    )
    reader.check("here")
    assert reader.tokens().sampled_ids.tolist() == [5, 6, 7]
    assert reader.tokens().prompt_ids.tolist() == [1, 2]
    assert reader.versions == [1, 2]
    assert parts[2].spans == (
        VersionSpan(start=0, length=2, version=1),
        VersionSpan(start=2, length=1, version=2),
    )
    assert reader.finish_reason == "stop"


def test_a_version_that_nobody_set_names_nothing() -> None:
    choice = {
        "index": 0,
        "token_ids": [5],
        "logprobs": {"content": [{"logprob": -1.0}]},
        "finish_reason": "stop",
    }
    choice["weight_versions"] = [{"version": "default", "start": 0, "end": 1}]
    reader, (part,) = read(VllmGenerate(), [{"choices": [choice], "prompt_token_ids": [1]}], stream=False)
    assert (reader.versions, part.spans) == ([], ())


def sglang_piece(ids: list[int], total: int, **meta: Any) -> dict[str, Any]:
    triples = [[-float(token), token, None] for token in ids]
    more = {"prompt_tokens": 2, "completion_tokens": total, "weight_version": "3", "finish_reason": None}
    return {"text": "", "output_ids": ids, "meta_info": {**more, "output_token_logprobs": triples, **meta}}


@pytest.mark.parametrize("cumulative", [True, False])
def test_sglang_streams_everything_so_far_or_what_is_new(cumulative: bool) -> None:
    end = {"finish_reason": {"type": "stop", "matched": 9}}
    if cumulative:
        pieces = [sglang_piece([5], 1), sglang_piece([5, 6, 7], 3), sglang_piece([5, 6, 7, 9], 4, **end)]
    else:
        pieces = [sglang_piece([5], 1), sglang_piece([6, 7], 3), sglang_piece([9], 4, **end)]
    reader, parts = read(SglangGenerate(), pieces, stream=True)
    assert [list(part.ids) for part in parts] == [[5], [6, 7], [9]]
    assert reader.tokens().logprobs.tolist() == [-5, -6, -7, -9]
    assert (reader.finish_reason, reader.versions[-1]) == ("stop", 3)


def test_sglang_log_probabilities_of_other_ids_are_refused() -> None:
    piece = sglang_piece([5, 6], 2)
    piece["meta_info"]["output_token_logprobs"][1][1] = 7
    with pytest.raises(ValueError, match="other ids"):
        SglangGenerate().reading(stream=False).take(piece)


def test_a_reply_that_sglang_aborted_is_none() -> None:
    piece = sglang_piece([5], 1, finish_reason={"type": "abort", "message": "out of memory"})
    with pytest.raises(ValueError, match="out of memory"):
        SglangGenerate().reading(stream=False).take(piece)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TokenRenderer:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    return TokenRenderer.load(str(directory), renderer="qwen3", thinking_retention="all")


async def ask(
    server: PolicyServer, engine: Engine, asked: Question, conversation: TokenConversation, rendered: Any
) -> tuple[ReplyReader, Any]:
    """One call as the gateway makes it: ids go out, ids come back, and are read as they come."""
    reader, reading = ReplyReader(), engine.reading(stream=asked.request.stream)
    stream, builder = conversation.stream(rendered, asked.request.tools), MessageBuilder()

    def take(piece: Any) -> None:
        part = reading.take(piece)
        reader.take(part)
        builder.add(stream.feed(part.ids))

    async with (
        aiohttp.ClientSession() as client,
        client.post(
            server.base_url + engine.path,
            data=engine.body(asked, model="policy"),
            headers={"Content-Type": "application/json", "X-Session-Id": "s"},
        ) as response,
    ):
        assert response.status == 200, await response.text()
        if asked.request.stream:
            async for batch in events(response.content.iter_any()):
                for data in batch:
                    if data != b"[DONE]":
                        take(from_json(data))
        else:
            take(await response.json())
    finished = stream.finish()
    builder.add(finished.delta)
    assert builder.message() == finished.message
    return reader, finished


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_session_over_ids_is_one_unbroken_sequence(
    kind: type[Engine], stream: bool, incremental: bool, renderer: TokenRenderer
) -> None:
    turns = [
        Turn(
            text=f"Turn {number}: naïve 漢字.", reasoning="Hm.", tools=(bash("ls"), bash("pwd"))[: number % 3]
        )
        for number in range(1, 6)
    ]

    async def scenario() -> None:
        async with PolicyServer(
            [script(*turns)], template="qwen3", noncanonical=0.5, version=4, incremental=incremental
        ) as server:
            conversation = TokenConversation(renderer)
            messages: list[Any] = [user(PROMPT)]
            known: list[int] = []
            for index in range(5):
                rendered = conversation.prompt(messages, (BASH,), call_index=index)
                request = ChatRequest(tuple(messages), stream=stream, tools=(BASH,))
                asked = Question(
                    request,
                    Sampling(temperature=1.0, max_tokens=2000),
                    rendered.ids,
                    stop_ids=renderer.stop_ids,
                )
                reader, finished = await ask(server, kind(), asked, conversation, rendered)
                sampled = server.sampled[-1]
                assert list(sampled.prompt_ids) == rendered.ids.tolist()
                assert rendered.ids[: len(known)].tolist() == known
                assert rendered.how is (How.BRIDGED if index else How.RENDERED)
                assert reader.tokens().sampled_ids.tolist() == list(sampled.sampled_ids) == finished.ids
                assert reader.tokens().logprobs.tolist() == pytest.approx(list(sampled.logprobs))
                assert reader.usage().completion_counted == len(sampled.sampled_ids)
                assert reader.versions[-1] == 4
                conversation.reply(rendered, finished)
                known = [*sampled.prompt_ids, *sampled.sampled_ids]
                message = {
                    name: value for name, value in finished.message.items() if name != "reasoning_content"
                }
                assert finished.message["reasoning_content"] == "Hm."
                messages = [*messages, message]
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
                    for call in message.get("tool_calls", ())
                ]
                if messages[-1]["role"] == "assistant":
                    messages.append(user("go on"))

    run(scenario)
