"""What is read of a request to OpenAI Responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, TypeAdapter
from typing_extensions import TypedDict


class Text(TypedDict):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class Message(TypedDict):
    role: Literal["user", "assistant", "system", "developer"]
    content: NotRequired[str | list[Text] | None]


class Reasoning(TypedDict):
    summary: NotRequired[str | list[Text] | None]
    content: NotRequired[str | list[Text] | None]
    encrypted_content: NotRequired[str | None]


class FunctionCall(TypedDict):
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    arguments: str


class CustomCall(TypedDict):
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    input: str


class Output(TypedDict):
    call_id: str
    output: str | list[Text]


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[Output, Tag("function_call_output")]
    | Annotated[Output, Tag("custom_tool_call_output")],
    Discriminator(_kind),
]


class Grammar(TypedDict):
    type: str
    syntax: NotRequired[str | None]
    definition: NotRequired[str | None]


class Tool(TypedDict):
    type: str
    name: NotRequired[str | None]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    format: NotRequired[Grammar | None]
    tools: NotRequired[list[Tool] | None]


class ToolChoice(TypedDict):
    type: str
    name: NotRequired[str | None]


class TextFormat(TypedDict):
    type: str
    schema: NotRequired[dict[str, Any] | None]


class TextConfig(TypedDict):
    format: NotRequired[TextFormat | None]


class ResponsesBody(TypedDict):
    instructions: NotRequired[str | None]
    input: str | Annotated[list[Item], Field(min_length=1)]
    tools: NotRequired[list[Tool] | None]
    tool_choice: NotRequired[Literal["none", "auto", "required"] | ToolChoice | None]
    text: NotRequired[TextConfig | None]
    include: NotRequired[list[str] | None]
    parallel_tool_calls: NotRequired[bool | None]
    stream: NotRequired[bool | None]


BODY: TypeAdapter[Any] = TypeAdapter(ResponsesBody)
