"""Every dialect, driven by the official client of its API: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import anthropic
import openai
import pytest
from google import genai
from google.genai import types

from hpcroll.gateway import ModelEndpoint
from hpcroll.testing.dialect_suite import Asked, Called, DialectClient, DialectContract, Heard, Refused

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class _Sync:
    """Blocking calls of a library, in a thread so that the gateway's loop goes on."""

    @staticmethod
    async def call(method: Any, **fields: Any) -> Any:
        return await asyncio.to_thread(method, **fields)

    @staticmethod
    async def items(method: Any, **fields: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: list(method(**fields)))

    @staticmethod
    async def close(client: Any) -> None:
        client.close()


class _Async:
    @staticmethod
    async def call(method: Any, **fields: Any) -> Any:
        return await method(**fields)

    @staticmethod
    async def items(method: Any, **fields: Any) -> list[Any]:
        return [item async for item in await method(**fields)]

    @staticmethod
    async def close(client: Any) -> None:
        await client.close()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- OpenAI ----------------------------------------------------------------------------


class _OpenAIClient(DialectClient):
    style: ClassVar[Any]
    library: ClassVar[Any]

    def __init__(self, endpoint: ModelEndpoint) -> None:
        super().__init__(endpoint)
        self.client = self.library(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)

    async def close(self) -> None:
        await self.style.close(self.client)

    async def models(self) -> list[str]:
        return [model.id for model in (await self.style.call(self.client.models.list)).data]

    async def count(self, asked: Asked) -> int | None:
        return None


def _openai_refused(error: openai.APIError) -> Refused:
    return Refused(getattr(error, "status_code", None), f"{error.code}: {error.message}")


class _Chat(_OpenAIClient):
    async def ask(self, asked: Asked) -> Heard | Refused:
        fields: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": list(self._messages(asked)),
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in asked.tools
            ],
        }
        create = self.client.chat.completions.create
        try:
            if not asked.stream:
                return self._whole(await self.style.call(create, **fields))
            usage = {"include_usage": True}
            return _chat_pieces(await self.style.items(create, stream=True, stream_options=usage, **fields))
        except openai.APIError as error:
            return _openai_refused(error)

    def _messages(self, asked: Asked) -> Iterator[Any]:
        if asked.system:
            yield {"role": "system", "content": asked.system}
        for turn in asked.turns:
            if isinstance(turn, str):
                yield {"role": "user", "content": turn}
            elif isinstance(turn, Heard):
                yield turn.native
            else:
                for call, result in turn:
                    yield {"role": "tool", "tool_call_id": call.call_id, "content": result}
        if asked.image:
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
            yield {"role": "user", "content": [image]}

    @staticmethod
    def _whole(completion: Any) -> Heard:
        choice = completion.choices[0]
        message = choice.message
        calls = [
            Called(call.id, call.function.name, _json(call.function.arguments))
            for call in message.tool_calls or ()
        ]
        return Heard(
            text=message.content or "",
            reasoning=getattr(message, "reasoning_content", None) or "",
            calls=tuple(calls),
            ending=choice.finish_reason,
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
            native=message.model_dump(exclude_none=True),
        )


def _chat_pieces(chunks: Sequence[Any]) -> Heard:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    ending = ""
    for chunk in chunks:
        for choice in chunk.choices:
            ending = choice.finish_reason or ending
            texts += [choice.delta.content] if choice.delta.content else []
            thoughts.append(getattr(choice.delta, "reasoning_content", None) or "")
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"id": piece.id, "name": "", "arguments": ""})
                call["name"] += piece.function.name or ""
                call["arguments"] += piece.function.arguments or ""
    native: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        native["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls.values()
        ]
    return Heard(
        text="".join(texts),
        reasoning="".join(thoughts),
        calls=tuple(Called(call["id"], call["name"], _json(call["arguments"])) for call in calls.values()),
        ending=ending,
        prompt_tokens=chunks[-1].usage.prompt_tokens,
        completion_tokens=chunks[-1].usage.completion_tokens,
        pieces=len(texts),
        native=native,
    )


class ChatSync(_Chat):
    style, library = _Sync, openai.OpenAI


class ChatAsync(_Chat):
    style, library = _Async, openai.AsyncOpenAI


class TestOpenAIChat(DialectContract):
    name = "openai_chat"
    clients = (ChatSync, ChatAsync)

    def check_overflow(self, refused: Refused) -> None:
        assert "context_length_exceeded" in refused.message


class _Responses(_OpenAIClient):
    async def ask(self, asked: Asked) -> Heard | Refused:
        fields: dict[str, Any] = {
            "model": self.endpoint.model,
            "instructions": asked.system,
            "input": list(self._items(asked)),
            "max_output_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [
                {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
                for name in asked.tools
            ],
        }
        create = self.client.responses.create
        try:
            if not asked.stream:
                return _response(await self.style.call(create, **fields), pieces=1)
            events = await self.style.items(create, stream=True, **fields)
        except openai.APIError as error:
            return _openai_refused(error)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        if last.type == "response.failed":
            return Refused(None, last.response.error.message)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == last.response.output
        heard = _response(last.response, pieces=len(deltas))
        assert "".join(deltas) == heard.text
        return heard

    async def count(self, asked: Asked) -> int | None:
        counted = await self.style.call(
            self.client.responses.input_tokens.count,
            model=self.endpoint.model,
            instructions=asked.system,
            input=list(self._items(asked)),
            tools=[
                {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
                for name in asked.tools
            ],
        )
        return int(counted.input_tokens)

    def _items(self, asked: Asked) -> Iterator[Any]:
        for turn in asked.turns:
            if isinstance(turn, str):
                yield {"role": "user", "content": turn}
            elif isinstance(turn, Heard):
                yield from turn.native
            else:
                for call, result in turn:
                    yield {"type": "function_call_output", "call_id": call.call_id, "output": result}
        if asked.image:
            yield {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}


def _response(response: Any, *, pieces: int) -> Heard:
    thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content]
    calls = [
        Called(item.call_id, item.name, _json(item.arguments))
        for item in response.output
        if item.type == "function_call"
    ]
    ending = "length" if response.status == "incomplete" else "tool_calls" if calls else "stop"
    return Heard(
        text=response.output_text,
        reasoning="".join(thoughts),
        calls=tuple(calls),
        ending=ending,
        prompt_tokens=response.usage.input_tokens,
        completion_tokens=response.usage.output_tokens,
        pieces=pieces,
        native=[item.model_dump(exclude_none=True) for item in response.output],
    )


class ResponsesSync(_Responses):
    style, library = _Sync, openai.OpenAI


class ResponsesAsync(_Responses):
    style, library = _Async, openai.AsyncOpenAI


class TestOpenAIResponses(DialectContract):
    name = "openai_responses"
    clients = (ResponsesSync, ResponsesAsync)

    def check_overflow(self, refused: Refused) -> None:
        assert "context_length_exceeded" in refused.message


# --- Anthropic -------------------------------------------------------------------------


class _Messages(DialectClient):
    style: ClassVar[Any]
    library: ClassVar[Any]

    def __init__(self, endpoint: ModelEndpoint) -> None:
        super().__init__(endpoint)
        self.client = self.library(base_url=self.root, api_key=endpoint.api_key, max_retries=0)

    async def close(self) -> None:
        await self.style.close(self.client)

    async def ask(self, asked: Asked) -> Heard | Refused:
        fields = {
            **self._prompt(asked),
            "max_tokens": asked.max_tokens,
            "extra_body": {"temperature": asked.temperature},
        }
        create = self.client.messages.create
        try:
            if not asked.stream:
                return _message(await self.style.call(create, **fields), pieces=1)
            return await self._streamed(fields)
        except anthropic.APIStatusError as error:
            # Within a stream, the status is that of its beginning.
            status = None if error.status_code == 200 else error.status_code
            return Refused(status, str(error.message))

    async def _streamed(self, fields: dict[str, Any]) -> Heard:
        # The library's own accumulator, which checks the order of events.
        def sync() -> tuple[Any, int]:
            with self.client.messages.stream(**fields) as stream:
                pieces = sum(event.type == "text" for event in stream)
                return stream.get_final_message(), pieces

        if self.style is _Sync:
            message, pieces = await asyncio.to_thread(sync)
        else:
            async with self.client.messages.stream(**fields) as stream:
                pieces = sum([event.type == "text" async for event in stream])
                message = await stream.get_final_message()
        return _message(message, pieces=pieces)

    async def count(self, asked: Asked) -> int | None:
        counted = await self.style.call(self.client.messages.count_tokens, **self._prompt(asked))
        return int(counted.input_tokens)

    async def models(self) -> list[str]:
        return [model.id for model in (await self.style.call(self.client.models.list)).data]

    def _prompt(self, asked: Asked) -> dict[str, Any]:
        cached = {"type": "ephemeral"}
        return {
            "model": self.endpoint.model,
            "system": [
                {"type": "text", "text": text, "cache_control": cached} for text in (asked.system,) if text
            ],
            "messages": list(self._messages(asked)),
            "tools": [{"name": name, "input_schema": SCHEMA} for name in asked.tools],
        }

    def _messages(self, asked: Asked) -> Iterator[Any]:
        for turn in asked.turns:
            if isinstance(turn, str):
                yield {"role": "user", "content": turn}
            elif isinstance(turn, Heard):
                yield {"role": "assistant", "content": turn.native}
            else:
                results = [
                    {"type": "tool_result", "tool_use_id": call.call_id, "content": result}
                    for call, result in turn
                ]
                yield {"role": "user", "content": results}
        if asked.image:
            source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
            yield {"role": "user", "content": [{"type": "image", "source": source}]}


def _message(message: Any, *, pieces: int) -> Heard:
    endings = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    return Heard(
        text="".join(block.text for block in message.content if block.type == "text"),
        reasoning="".join(block.thinking for block in message.content if block.type == "thinking"),
        calls=tuple(
            Called(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"
        ),
        ending=endings[message.stop_reason],
        prompt_tokens=message.usage.input_tokens,
        completion_tokens=message.usage.output_tokens,
        pieces=pieces,
        native=[block.model_dump(exclude_none=True) for block in message.content],
    )


class MessagesSync(_Messages):
    style, library = _Sync, anthropic.Anthropic


class MessagesAsync(_Messages):
    style, library = _Async, anthropic.AsyncAnthropic


class TestAnthropicMessages(DialectContract):
    name = "anthropic_messages"
    clients = (MessagesSync, MessagesAsync)

    def check_overflow(self, refused: Refused) -> None:
        assert "prompt is too long: " in refused.message
        assert "tokens > 1200 maximum" in refused.message


# --- Google ----------------------------------------------------------------------------


class _Generate(DialectClient):
    style: ClassVar[Any]

    def models_of(self, client: genai.Client) -> Any:
        raise NotImplementedError

    def __init__(self, endpoint: ModelEndpoint) -> None:
        super().__init__(endpoint)
        options = types.HttpOptions(base_url=self.root, retry_options=types.HttpRetryOptions(attempts=1))
        self.client = genai.Client(api_key=endpoint.api_key, http_options=options)

    async def close(self) -> None:
        await self.client.aio.aclose()
        self.client.close()

    async def ask(self, asked: Asked) -> Heard | Refused:
        models = self.models_of(self.client)
        fields = {
            "model": "any-model",
            "contents": list(self._contents(asked)),
            "config": self._config(asked),
        }
        try:
            if asked.stream:
                return _generated(await self.style.items(models.generate_content_stream, **fields))
            return _generated([await self.style.call(models.generate_content, **fields)])
        except genai.errors.APIError as error:
            return Refused(error.code, error.message or "")

    async def count(self, asked: Asked) -> int | None:
        # The client counts contents alone for this API.
        counted = await self.style.call(
            self.models_of(self.client).count_tokens,
            model="any-model",
            contents=list(self._contents(asked)),
        )
        return int(counted.total_tokens)

    async def models(self) -> list[str]:
        found = await self.style.call(self.models_of(self.client).list)
        return [model.name.removeprefix("models/") for model in found.page]

    def _config(self, asked: Asked) -> types.GenerateContentConfig:
        declared = [
            types.FunctionDeclaration(name=name, parameters_json_schema=SCHEMA) for name in asked.tools
        ]
        return types.GenerateContentConfig(
            system_instruction=asked.system or None,
            temperature=asked.temperature,
            max_output_tokens=asked.max_tokens,
            tools=[types.Tool(function_declarations=declared)] if declared else None,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )

    def _contents(self, asked: Asked) -> Iterator[types.Content]:
        for turn in asked.turns:
            if isinstance(turn, str):
                yield types.Content(role="user", parts=[types.Part(text=turn)])
            elif isinstance(turn, Heard):
                yield types.Content(role="model", parts=turn.native)
            else:
                yield types.Content(role="user", parts=[self._answer(call, result) for call, result in turn])
        if asked.image:
            yield types.Content(role="user", parts=[types.Part.from_bytes(data=b"\0", mime_type="image/png")])

    def _answer(self, call: Called, result: str) -> types.Part:
        answer = types.FunctionResponse(id=call.call_id, name=call.name, response={"output": result})
        return types.Part(function_response=answer)


def _generated(chunks: Iterable[Any]) -> Heard:
    endings = {"STOP": "stop", "MAX_TOKENS": "length"}
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]
    texts = [part.text for part in parts if part.text and not part.thought]
    last = list(chunks)[-1]
    calls = tuple(
        Called(part.function_call.id, part.function_call.name, part.function_call.args)
        for part in parts
        if part.function_call
    )
    ending = endings[last.candidates[0].finish_reason.value]
    return Heard(
        text="".join(texts),
        reasoning="".join(part.text for part in parts if part.text and part.thought),
        calls=calls,
        ending="tool_calls" if calls else ending,
        prompt_tokens=last.usage_metadata.prompt_token_count,
        completion_tokens=last.usage_metadata.candidates_token_count,
        pieces=len(texts),
        native=[
            *([types.Part(text="".join(texts))] if texts else []),
            *(part for part in parts if part.function_call),
        ],
    )


class GenerateSync(_Generate):
    style = _Sync

    def models_of(self, client: genai.Client) -> Any:
        return client.models


class GenerateAsync(_Generate):
    style = _Async

    def models_of(self, client: genai.Client) -> Any:
        return client.aio.models


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestGoogleGenerate(DialectContract):
    name = "google_generate"
    clients = (GenerateSync, GenerateAsync)

    def check_overflow(self, refused: Refused) -> None:
        assert "exceeds the maximum number of tokens allowed (1200)" in refused.message
