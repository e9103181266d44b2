"""What an agent was shown and sends back in its API's own form is what was recorded, whatever was sampled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from google.genai.types import GenerateContentResponse
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from hpcroll.config import ModelConfig
from hpcroll.errors import ModelError
from hpcroll.gateway.chat import Delta, MessageBuilder, Reply, ToolCallDelta
from hpcroll.gateway.dialects.anthropic_messages import AnthropicMessages
from hpcroll.gateway.dialects.base import Caller, Dialect, HttpCall
from hpcroll.gateway.dialects.google_generate import GoogleGenerate
from hpcroll.gateway.dialects.openai_chat import OpenAIChat
from hpcroll.gateway.dialects.openai_responses import OpenAIResponses
from hpcroll.gateway.engines import engine_of
from hpcroll.gateway.recall import Recall
from hpcroll.gateway.reply import ReplyReader

EDITS = {"type": "array", "items": {"type": "object", "properties": {"all": {"default": False}}}}
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "flag": {"default": False}, "edits": EDITS},
}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(TEXT | st.sampled_from(("text", "flag", "edits")), VALUES, max_size=4)
MALFORMED = st.sampled_from(
    ('{"text": "unfinish', "", "[1, 2]", "null", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', "say: hi")
)
ARGUMENTS = st.one_of(
    OBJECTS.map(json.dumps),
    OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1)),
    OBJECTS.map(lambda value: json.dumps(value, separators=(",", ":"))),
    MALFORMED,
    TEXT,
    st.just('{"text": "\\ud83d"}'),
)


@dataclass(frozen=True)
class Sampled:
    """A reply as a model gave it."""

    text: str
    reasoning: str
    arguments: tuple[str, ...]
    finish_reason: str
    cut: int
    """Streamed pieces are of this many characters."""
    again: bool = False
    """Thinks and says it once more."""

    def deltas(self) -> Iterator[Delta]:
        for _ in range(1 + self.again):
            yield from self._said()
        yield from self._called()

    def _said(self) -> Iterator[Delta]:
        for start in range(0, len(self.reasoning), self.cut):
            yield Delta(reasoning=self.reasoning[start : start + self.cut])
        for start in range(0, len(self.text), self.cut):
            yield Delta(content=self.text[start : start + self.cut])

    def _called(self) -> Iterator[Delta]:
        for index, arguments in enumerate(self.arguments):
            yield Delta(tool_calls=(ToolCallDelta(index, id=f"call_{index}", name="look"),))
            for start in range(0, len(arguments), self.cut):
                piece = ToolCallDelta(index, arguments=arguments[start : start + self.cut])
                yield Delta(tool_calls=(piece,))

    def reply(self) -> Reply:
        builder = MessageBuilder()
        for delta in self.deltas():
            builder.add(delta)
        reason = "tool_calls" if self.arguments and self.finish_reason == "stop" else self.finish_reason
        return Reply(builder.message(), reason, prompt_tokens=7, completion_tokens=11)


SAMPLED = st.builds(
    Sampled,
    text=TEXT,
    reasoning=TEXT,
    arguments=st.lists(ARGUMENTS, max_size=3).map(tuple),
    finish_reason=st.sampled_from(("stop", "length")),
    cut=st.integers(1, 5),
    again=st.booleans(),
)


def streamed(caller: Caller, sampled: Sampled) -> list[dict[str, Any]]:
    """The data of the events of a streamed reply."""
    stream = caller.opening(0) + b"".join(caller.delta(delta) for delta in sampled.deltas())
    stream += caller.closing(sampled.reply())
    lines = stream.decode().replace("\r\n", "\n").split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item, parse_constant=_no_constant) for item in data if item != "[DONE]"]


def whole(caller: Caller, sampled: Sampled) -> dict[str, Any]:
    text = json.dumps(caller.whole(sampled.reply()))
    return dict(json.loads(text, parse_constant=_no_constant))


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


Parsed = tuple[Any, str, tuple[int, int]]
"""A reply in its API's form, its ending, and the tokens of prompt and reply."""


class Api(Protocol):
    """A faithful client."""

    dialect: Dialect
    request: dict[str, Any]

    def whole(self, data: dict[str, Any]) -> Parsed: ...

    def events(self, events: Sequence[dict[str, Any]]) -> Parsed: ...

    def sends(self, native: Any) -> dict[str, Any]:
        """The next request."""
        ...


class Chat:
    dialect = OpenAIChat("policy")
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
        "stream_options": {"include_usage": True},
    }

    def whole(self, data: dict[str, Any]) -> Parsed:
        completion = ChatCompletion.model_validate(data, strict=True)
        usage = completion.usage
        assert usage is not None
        (choice,) = completion.choices
        native = choice.message.model_dump(exclude_none=True)
        return native, choice.finish_reason, (usage.prompt_tokens, usage.completion_tokens)

    def events(self, events: Sequence[dict[str, Any]]) -> Parsed:
        chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
        native: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        reason = None
        for chunk in chunks[:-1]:
            (choice,) = chunk.choices
            assert reason is None
            reason = choice.finish_reason
            native["content"] += choice.delta.content or ""
            thought = (choice.delta.model_extra or {}).get("reasoning_content", "")
            native["reasoning_content"] = native.get("reasoning_content", "") + thought
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                if piece.index == len(calls):
                    function = {"name": piece.function.name, "arguments": ""}
                    calls.append({"id": piece.id, "type": "function", "function": function})
                calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
        usage = chunks[-1].usage
        assert usage is not None
        assert reason is not None
        return {**native, "tool_calls": calls}, reason, (usage.prompt_tokens, usage.completion_tokens)

    def sends(self, native: Any) -> dict[str, Any]:
        return {**self.request, "messages": [*self.request["messages"], native]}


class CompactingChat(Chat):
    """Writes arguments anew, as agents in JavaScript do."""

    def sends(self, native: Any) -> dict[str, Any]:
        calls = [
            {**call, "function": {**call["function"], "arguments": _compacted(call["function"]["arguments"])}}
            for call in native.get("tool_calls") or ()
        ]
        return super().sends({**native, "content": native.get("content") or "", "tool_calls": calls})


def _compacted(text: str) -> str:
    try:
        value = json.loads(text, parse_constant=_no_json)
        json.dumps(value, ensure_ascii=False).encode()
        if not isinstance(value, dict):
            return text
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return text


def _no_json(name: str) -> Any:
    raise ValueError(name)


class Responses:
    dialect = OpenAIResponses("policy")
    request = {
        "input": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
        "include": ["reasoning.encrypted_content"],
    }
    event = TypeAdapter(ResponseStreamEvent)

    def whole(self, data: dict[str, Any]) -> Parsed:
        response = Response.model_validate(data, strict=True)
        usage = response.usage
        assert usage is not None
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        native = [item.model_dump(exclude_none=True) for item in response.output]
        calls = any(item["type"].endswith("_call") for item in native)
        ending = "length" if response.status == "incomplete" else "tool_calls" if calls else "stop"
        return native, ending, (usage.input_tokens, usage.output_tokens)

    def events(self, events: Sequence[dict[str, Any]]) -> Parsed:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            self.event.validate_python(event)
        texts: dict[tuple[int, str], str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                key = (event["output_index"], event["type"].removesuffix(".delta"))
                texts[key] = texts.get(key, "") + event["delta"]
            elif event["type"].endswith(("text.done", "arguments.done", "input.done")):
                kind = event["type"].removesuffix(".done")
                full = event.get("text", event.get("arguments", event.get("input")))
                assert texts.get((event["output_index"], kind), "") == full
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
        assert added == list(range(len(done)))
        last = events[-1]["response"]
        assert last["output"] == done
        return self.whole(last)

    def sends(self, native: Any) -> dict[str, Any]:
        return {**self.request, "input": [*self.request["input"], *native]}


class CustomTools(Responses):
    """Tools that take text."""

    request = {**Responses.request, "tools": [{"type": "custom", "name": "look"}]}


class Messages:
    dialect = AnthropicMessages("policy")
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "look", "input_schema": SCHEMA}],
        "max_tokens": 99,
    }
    event = TypeAdapter(RawMessageStreamEvent)
    endings = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}

    def whole(self, data: dict[str, Any]) -> Parsed:
        message = AnthropicMessage.model_validate(data, strict=True)
        assert message.stop_reason is not None
        native = [block.model_dump(exclude_none=True) for block in message.content]
        usage = (message.usage.input_tokens, message.usage.output_tokens)
        return native, self.endings[message.stop_reason], usage

    def events(self, events: Sequence[dict[str, Any]]) -> Parsed:
        for event in events:
            self.event.validate_python(event)
        first, *middle, last_but_one, last = events
        assert (first["type"], last["type"]) == ("message_start", "message_stop")
        assert last_but_one["type"] == "message_delta"
        blocks: list[dict[str, Any]] = []
        for event in middle:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": "", "open": True})
                continue
            block = blocks[event["index"]]
            assert (block["open"], event["index"]) == (True, len(blocks) - 1)
            if event["type"] == "content_block_stop":
                block["open"] = False
                continue
            for name, text in event["delta"].items():
                if name != "type":
                    field = "json" if name == "partial_json" else name
                    block[field] += text
        for block in blocks:
            assert not block.pop("open")
            text = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(text or "{}", parse_constant=_no_constant)
        usage = (first["message"]["usage"]["input_tokens"], last_but_one["usage"]["output_tokens"])
        assert last_but_one["usage"]["input_tokens"] == 7
        ending = self.endings[last_but_one["delta"]["stop_reason"]]
        return blocks, ending, (usage[0] or 7, usage[1])

    def sends(self, native: Any) -> dict[str, Any]:
        turn = {"role": "assistant", "content": native or ""}
        follow = {"role": "user", "content": "go on"}
        return {**self.request, "messages": [*self.request["messages"], turn, follow]}


class FillingMessages(Messages):
    """Puts the defaults of the schema in, and moves the mark of its cache."""

    def sends(self, native: Any) -> dict[str, Any]:
        shown = []
        for block in native:
            if block["type"] == "tool_use":
                value = dict(block["input"])
                if isinstance(edits := value.get("edits"), list):
                    value["edits"] = [
                        {"all": False, **edit} if isinstance(edit, dict) else edit for edit in edits
                    ]
                block = {**block, "input": {"flag": False, **value}}
            shown.append({**block, "cache_control": {"type": "ephemeral"}})
        return super().sends(shown)


class Generate:
    dialect = GoogleGenerate("policy")
    request = {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "look", "parametersJsonSchema": SCHEMA}]}],
    }

    def whole(self, data: dict[str, Any]) -> Parsed:
        return self.events([data])

    def events(self, events: Sequence[dict[str, Any]]) -> Parsed:
        parts: list[dict[str, Any]] = []
        for event in events:
            GenerateContentResponse.model_validate(event)
            (candidate,) = event["candidates"]
            for part in candidate["content"]["parts"]:
                same = parts and "text" in part and "text" in parts[-1]
                if same and part.get("thought") == parts[-1].get("thought"):
                    parts[-1] = {**part, "text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(part)
        endings = [candidate["finishReason"] for candidate in _finished(events)]
        assert len(endings) == 1
        calls = any("functionCall" in part for part in parts)
        ending = "length" if endings == ["MAX_TOKENS"] else "tool_calls" if calls else "stop"
        usage = events[-1]["usageMetadata"]
        assert usage["totalTokenCount"] == usage["promptTokenCount"] + usage["candidatesTokenCount"]
        return parts, ending, (usage["promptTokenCount"], usage["candidatesTokenCount"])

    def sends(self, native: Any) -> dict[str, Any]:
        turn = {"role": "model", "parts": native or [{"text": ""}]}
        return {**self.request, "contents": [*self.request["contents"], turn]}


def _finished(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    every = [candidate for event in events for candidate in event["candidates"]]
    return [candidate for candidate in every if "finishReason" in candidate]


APIS: dict[str, Callable[[], Api]] = {
    "chat": Chat,
    "compacting_chat": CompactingChat,
    "responses": Responses,
    "custom_tools": CustomTools,
    "messages": Messages,
    "filling_messages": FillingMessages,
    "generate": Generate,
}


@pytest.mark.parametrize("name", APIS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(sampled=SAMPLED, stream=st.booleans())
@example(Sampled("", "", ('{"text": "é", "edits": [{}, {"all": true}]}',), "stop", 3), True)
@example(Sampled("", "", ('{"flag": 0}',), "stop", 3), False)
@example(Sampled("", "", ('{"input": "patch", "why": 1}',), "stop", 3), True)
@example(Sampled("", "only thought", (), "length", 3), True)
@example(Sampled("", "", (), "stop", 3), True)
@example(Sampled("said", "thought", ("{}",), "stop", 3, again=True), True)
def test_reply_that_comes_back_is_what_was_recorded(name: str, sampled: Sampled, stream: bool) -> None:
    api = APIS[name]()
    body = {**api.request, "stream": stream}
    route = api.dialect.calls[-1 if stream else 0]
    caller = api.dialect.read(HttpCall(body, route, {"alt": "sse"}))
    if stream:
        native, ending, usage = api.events(streamed(caller, sampled))
    else:
        native, ending, usage = api.whole(whole(caller, sampled))
    reply = sampled.reply()
    assert usage == (7, 11)
    assert ending == reply.finish_reason
    recall = Recall()
    recall.note(reply.message)
    back = json.loads(json.dumps(api.sends(native)))
    request = api.dialect.read(HttpCall(back, route)).request
    returned = [
        message
        for message in recall.restore(request.messages, request.tools)
        if message["role"] == "assistant"
    ]
    expected = [reply.message] if len(reply.message) > 2 or reply.content or returned else []
    assert returned == expected


def from_server(**choice: Any) -> ReplyReader:
    """What is read of a reply of vLLM."""
    entries = [{"logprob": -0.5}, {"logprob": -1.5}]
    message = {"role": "assistant", "content": "hi"}
    fields = {"message": message, "token_ids": [7, 8], "logprobs": {"content": entries}, **choice}
    reader = ReplyReader()
    reading = engine_of("vllm", ModelConfig()).reading(stream=False)
    reader.take(reading.take({"prompt_token_ids": [1, 2, 3], "choices": [fields]}))
    return reader


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 151645}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": None}, "end_turn", None),
        ({"finish_reason": "length", "stop_reason": None}, "max_tokens", None),
        ({"finish_reason": "repetition"}, "end_turn", None),
    ],
)
def test_stop_sequence_that_ended_a_reply_is_named(
    choice: dict[str, Any], reason: str, sequence: str | None
) -> None:
    reader = from_server(**choice)
    reader.check("server")
    body = {**Messages.request, "stop_sequences": ["END"]}
    caller = Messages.dialect.read(HttpCall(body))
    assert caller.request.asked.stop == ("END",)
    message = AnthropicMessage.model_validate(caller.whole(reader.reply()))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    events = caller.closing(reader.reply()).decode().split("data: ")
    delta = json.loads(events[1].split("\n")[0])["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_reply_that_the_server_broke_off_is_none(reason: str) -> None:
    with pytest.raises(ModelError, match=f"server broke off its reply: finish_reason '{reason}'"):
        from_server(finish_reason=reason).check("server")


def test_calls_of_one_id_in_several_replies_are_told_apart_by_their_arguments() -> None:
    recall = Recall()
    texts = ('{"text":   "one"}', '{"text": "two" }', '{"text":"two"}')
    for text in texts[:2]:
        call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": text}}
        recall.note({"role": "assistant", "content": None, "tool_calls": [call]})
    messages = [
        {"role": "assistant", "tool_calls": [{**call, "function": {"name": "look", "arguments": sent}}]}
        for sent in ('{"text": "one"}', texts[2], '{"text": "three"}', texts[0])
    ]
    restored = recall.restore(messages, ())
    found = [message["tool_calls"][0]["function"]["arguments"] for message in restored]
    assert found == [texts[0], texts[1], '{"text": "three"}', texts[0]]
