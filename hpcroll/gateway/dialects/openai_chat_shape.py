"""What is read of a request to OpenAI Chat Completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict


class Text(TypedDict):
    type: Literal["text"]
    text: str


class Function(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: Function


class Said(TypedDict):
    role: Literal["system", "developer", "user"]
    content: NotRequired[str | list[Text] | None]


class Replied(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[str | list[Text] | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]
    function_call: NotRequired[None]


class Result(TypedDict):
    role: Literal["tool"]
    tool_call_id: NotRequired[str | None]
    content: NotRequired[str | list[Text] | None]


class Declared(TypedDict):
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class Tool(TypedDict):
    type: Literal["function"]
    function: Declared


class JsonSchema(TypedDict):
    schema: NotRequired[dict[str, Any] | None]


class ResponseFormat(TypedDict):
    type: str
    json_schema: NotRequired[JsonSchema | None]


class StreamOptions(TypedDict):
    include_usage: NotRequired[bool | None]


class ChatBody(TypedDict):
    messages: Annotated[
        list[Annotated[Said | Replied | Result, Field(discriminator="role")]], Field(min_length=1)
    ]
    modalities: NotRequired[list[Literal["text"]] | None]
    tools: NotRequired[list[Tool] | None]
    tool_choice: NotRequired[Literal["none", "auto", "required"] | dict[str, Any] | None]
    response_format: NotRequired[ResponseFormat | None]
    structured_outputs: NotRequired[dict[str, Any] | None]
    logit_bias: NotRequired[dict[str, float] | None]
    stream: NotRequired[bool | None]
    stream_options: NotRequired[StreamOptions | None]
    logprobs: NotRequired[bool | None]


BODY: TypeAdapter[Any] = TypeAdapter(ChatBody)
