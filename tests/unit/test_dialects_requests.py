"""Whatever an agent sends is read as it stands, or refused by the name of what is wrong with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from hpcroll.config import ModelConfig
from hpcroll.contract import Sampling
from hpcroll.gateway.chat import ChatRequest, Reply, assistant_message
from hpcroll.gateway.dialects.anthropic_messages import AnthropicMessages
from hpcroll.gateway.dialects.base import Dialect, HttpCall
from hpcroll.gateway.dialects.google_generate import GoogleGenerate
from hpcroll.gateway.dialects.openai_chat import OpenAIChat
from hpcroll.gateway.dialects.openai_responses import OpenAIResponses
from hpcroll.gateway.engines import engine_of
from hpcroll.gateway.engines.base import Question
from hpcroll.gateway.engines.constraints import for_sglang, for_vllm
from hpcroll.gateway.purpose import declared_purpose
from hpcroll.gateway.recall import Recall
from hpcroll.gateway.refusal import Refusal
from hpcroll.gateway.sampling import force_sampling

SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "description": "MARK schema"}}}
FORM = {"type": "object", "properties": {}}
CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "MARK system"},
        {"role": "developer", "content": [{"type": "text", "text": "MARK developer"}]},
        {"role": "user", "content": [{"type": "text", "text": "MARK user", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": "MARK said",
            "reasoning_content": "MARK thought",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"text": "MARK"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "MARK result"},
        {"role": "assistant", "content": None, "reasoning": "MARK wondered"},
        {"role": "user", "content": "MARK last"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "look", "description": "MARK tool", "parameters": SCHEMA, "strict": False},
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}},
    "structured_outputs": {"json": FORM},
    "logit_bias": {"5": 1.5},
    "stop": ["a", "b"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "max_completion_tokens": 9,
    "logprobs": True,
    "n": 1,
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
}
RESPONSES: dict[str, Any] = {
    "model": "policy",
    "instructions": "MARK instructions",
    "input": [
        {"role": "developer", "content": "MARK developer"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "MARK user"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "unread"}],
            "content": [{"type": "reasoning_text", "text": "MARK thought"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "MARK said"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"text": "MARK"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "MARK input"},
        {"type": "function_call_output", "call_id": "c1", "output": "MARK result"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "MARK patched"}],
        },
    ],
    "tools": [
        {
            "type": "function",
            "name": "look",
            "description": "MARK tool",
            "parameters": SCHEMA,
            "strict": False,
        },
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "MARK grammar"},
        },
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "look"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": FORM, "strict": True}},
    "include": ["reasoning.encrypted_content"],
    "parallel_tool_calls": False,
    "reasoning": {"effort": "high", "summary": "auto"},
    "stream": True,
    "store": False,
    "temperature": 0.5,
    "max_output_tokens": 9,
    "metadata": {"a": "b"},
}
MESSAGES: dict[str, Any] = {
    "model": "policy",
    "system": [{"type": "text", "text": "MARK system", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "MARK user"},
        {"role": "system", "content": "MARK reminder"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "MARK thought", "signature": "s"},
                {"type": "text", "text": "MARK said"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"text": "MARK"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "MARK result", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "MARK other"}],
                },
                {"type": "text", "text": "MARK last"},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "MARK tool", "input_schema": SCHEMA, "type": "custom"}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": FORM}},
    "metadata": {"user_id": "x"},
    "thinking": {"type": "adaptive"},
    "stop_sequences": ["a"],
    "max_tokens": 9,
    "top_k": 5,
    "stream": True,
}
GENERATE: dict[str, Any] = {
    "systemInstruction": {"role": "user", "parts": [{"text": "MARK system"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "MARK user"}]},
        {
            "role": "model",
            "parts": [
                {"text": "MARK thought", "thought": True},
                {"text": "MARK said", "thoughtSignature": "x"},
                {"functionCall": {"id": "c1", "name": "look", "args": {"text": "MARK"}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "MARK result"}}},
                {"text": "MARK last"},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "look", "description": "MARK tool", "parametersJsonSchema": SCHEMA},
                {"name": "write", "parameters": {"type": "OBJECT", "properties": {}}},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
    "generationConfig": {
        "temperature": 1,
        "topK": 5,
        "maxOutputTokens": 9,
        "stopSequences": ["a"],
        "responseMimeType": "application/json",
        "responseJsonSchema": FORM,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
    },
}
DIALECTS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (OpenAIChat("policy"), CHAT),
    "responses": (OpenAIResponses("policy"), RESPONSES),
    "messages": (AnthropicMessages("policy"), MESSAGES),
    "generate": (GoogleGenerate("policy"), GENERATE),
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    SCALARS | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "role", "text", "content", "name", "parts", "id", "function", "input"))
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
every_dialect = pytest.mark.parametrize("name", DIALECTS)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def marks(value: Any) -> set[str]:
    """The texts in `value` that a model should see."""
    if isinstance(value, str):
        return {value} if value.startswith("MARK") else set()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {mark for item in inner for mark in marks(item)}


def read(dialect: Dialect, body: Mapping[str, Any]) -> ChatRequest:
    route = next(iter(dialect.calls))
    call = HttpCall(body, route)
    request = dialect.read(call).request
    declared_purpose(request, call, path_model=None, model="policy")
    return request


def send(request: ChatRequest) -> None:
    """All that is done with a request before it is on its way."""
    question = Question(request, Sampling(temperature=1.0))
    body = json.loads(engine_of("vllm", ModelConfig()).body(question, model="policy"))
    assert body["messages"]
    to_json([for_vllm(request.constraints), for_sglang(request.constraints)])
    recall = Recall()
    recall.note({"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": '{"text":"MARK"}'}}]})
    assert len(recall.restore(request.messages, request.tools)) == len(request.messages)
    assert request.tools_sha256 is None or request.tools


@every_dialect
def test_everything_that_a_model_should_see_reaches_it(name: str) -> None:
    dialect, body = DIALECTS[name]
    request = read(dialect, body)
    seen = json.dumps([request.messages, request.tools])
    assert {mark for mark in marks(body) if mark not in seen} == set()
    assert len(marks(body)) >= 9
    send(request)


def outcome(dialect: Dialect, body: dict[str, Any], *, count: bool = False) -> ChatRequest | Refusal:
    try:
        return dialect.read_count(HttpCall(body)) if count else read(dialect, body)
    except Refusal as refusal:
        return refusal


def check_refusal(refusal: Refusal) -> None:
    assert refusal.status == 400
    assert refusal.param, refusal.message
    assert refusal.param in refusal.message


@every_dialect
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_anything_in_the_place_of_any_field_is_read_or_refused(name: str, data: st.DataObject) -> None:
    dialect, sample = DIALECTS[name]
    body = copy.deepcopy(sample)
    path = data.draw(st.sampled_from(list(places(sample))))
    parent = at(body, path[:-1])
    if data.draw(st.booleans()):
        parent[path[-1]] = data.draw(JSON)
    else:
        del parent[path[-1]]
    for count in (False, True)[: 1 + bool(dialect.counts)]:
        found = outcome(dialect, body, count=count)
        if isinstance(found, Refusal):
            check_refusal(found)
            continue
        seen = json.dumps([found.messages, found.tools])
        assert {mark for mark in marks(body) if mark not in seen} == set(), path
        send(found)


@every_dialect
@settings(max_examples=50, deadline=None, derandomize=True)
@given(body=st.dictionaries(st.sampled_from(("messages", "input", "contents", "tools")), JSON, max_size=3))
def test_arbitrary_bodies_are_read_or_refused(name: str, body: dict[str, Any]) -> None:
    found = outcome(DIALECTS[name][0], body)
    if isinstance(found, Refusal):
        check_refusal(found)
    else:
        send(found)


@pytest.mark.parametrize(
    ("name", "change", "param", "words"),
    [
        ("chat", {"messages": []}, "messages", "at least 1"),
        ("chat", {"messages": [{"role": 5}]}, "messages[0].role", "(got 5)"),
        ("chat", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "a valid string or"),
        ("chat", {"messages": [{"role": "function", "content": ""}]}, "messages[0].role", "'function'"),
        (
            "chat",
            {"messages": [{"role": "assistant", "function_call": {}}]},
            "messages[0].function_call",
            "None",
        ),
        ("chat", {"modalities": ["audio"]}, "modalities[0]", "text"),
        ("chat", {"functions": [{"name": "x"}]}, "functions", "declare tools"),
        ("chat", {"function_call": "auto"}, "function_call", "tool_choice"),
        ("chat", {"tools": [1]}, "tools[0]", "an object (got 1)"),
        ("chat", {"tool_choice": "x"}, "tool_choice", "'required'"),
        ("chat", {"use_beam_search": True}, "use_beam_search", "not supported"),
        ("chat", {"stop": 3}, "stop", "(got 3)"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens", "greater"),
        ("responses", {"input": 7}, "input", "a valid list (got 7)"),
        ("responses", {"input": [{"type": "function_call"}]}, "input[0].call_id", "missing"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
        ("responses", {"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ("responses", {"tools": [{"type": "local_shell"}]}, "tools[0]", "'local_shell'"),
        ("responses", {"tools": [{"type": "custom", "name": "x"}] * 2}, "tools[1].name", "declared twice"),
        ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice", "not supported"),
        ("responses", {"background": True}, "background", "nothing is stored"),
        ("responses", {"max_output_tokens": "x"}, "max_output_tokens", "integer"),
        ("messages", {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1"),
        ("messages", {"messages": [{"role": "assistant", "content": "{"}]}, "messages", "prefill"),
        ("messages", {"tool_choice": "x"}, "tool_choice", "an object"),
        ("messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
        ("messages", {"tools": [{"type": "web_search_2", "name": "x"}]}, "tools[0]", "itself"),
        ("messages", {"stop_sequences": 3}, "stop_sequences", "(got 3)"),
        ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "itself"),
        ("generate", {"contents": [{"parts": [{"inlineData": {}}]}]}, "contents[0].parts[0]", "'inlineData'"),
        ("generate", {"contents": [{"role": "tool", "parts": [{}]}]}, "contents[0].role", "'model'"),
        ("generate", {"generationConfig": []}, "generationConfig", "an object"),
        ("generate", {"generation_config": {"top_k": "x"}}, "generationConfig.topK", "integer"),
        ("generate", {"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount", "one"),
        ("generate", {"system_instruction": {"parts": [{"a": {}}]}}, "systemInstruction.parts[0]", "'a'"),
    ],
)
def test_refusal_names_the_field_and_what_it_should_be(
    name: str, change: dict[str, Any], param: str, words: str
) -> None:
    dialect, sample = DIALECTS[name]
    body = {field: value for field, value in sample.items() if field not in ("system", "systemInstruction")}
    if "generation_config" in change:
        del body["generationConfig"]
    with pytest.raises(Refusal) as refused:
        read(dialect, {**body, **change})
    assert refused.value.status == 400
    assert refused.value.param == param
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("name", "change", "stop"),
    [
        ("chat", {"stop": "END"}, ["END"]),
        ("chat", {"stop": ["a", "END"]}, ["a", "END"]),
        ("messages", {"stop_sequences": ["END"]}, ["END"]),
        ("generate", {"generation_config": {"stop_sequences": ["END"]}}, ["END"]),
    ],
)
def test_stop_sequences_reach_the_server_and_are_recorded(
    name: str, change: dict[str, Any], stop: list[str]
) -> None:
    dialect, sample = DIALECTS[name]
    request = read(dialect, {**{key: sample[key] for key in sample if key != "generationConfig"}, **change})
    effective = force_sampling(request.asked, ModelConfig(), budget=99, identity="x")
    body = json.loads(engine_of("vllm", ModelConfig()).body(Question(request, effective), model="policy"))
    assert list(effective.stop or ()) == body["stop"] == stop


def test_tools_of_one_name_in_two_namespaces_are_told_apart() -> None:
    inner = [{"type": "function", "name": "search"}, {"type": "function", "name": "open"}]
    tools = [{"type": "namespace", "name": name, "tools": inner[: 3 - len(name)]} for name in ("a", "bc")]
    called = [
        {"type": "function_call", "call_id": "1", "namespace": "bc", "name": "search", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "namespace": "a", "name": "search", "arguments": "{}"},
    ]
    body = {"input": called, "tools": tools}
    caller = OpenAIResponses("policy").read(HttpCall(body))
    names = [tool["function"]["name"] for tool in caller.request.tools]
    assert names == ["search", "open", "bc__search"]
    calls = caller.request.messages[0]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["bc__search", "search"]
    output = caller.whole(Reply(assistant_message("", "", calls), "tool_calls"))["output"]
    assert [(item["namespace"], item["name"]) for item in output] == [("bc", "search"), ("a", "search")]
