"""What is read of a request to Anthropic Messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict


class Text(TypedDict):
    type: Literal["text"]
    text: str


class Thinking(TypedDict):
    type: Literal["thinking"]
    thinking: str


class ToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: NotRequired[dict[str, Any] | None]


class ToolResult(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | list[Text] | None]
    is_error: NotRequired[bool | None]


class User(TypedDict):
    role: Literal["user"]
    content: (
        str | Annotated[list[Annotated[Text | ToolResult, Field(discriminator="type")]], Field(min_length=1)]
    )


class Assistant(TypedDict):
    role: Literal["assistant"]
    content: str | list[Annotated[Text | Thinking | ToolUse, Field(discriminator="type")]]


class System(TypedDict):
    role: Literal["system"]
    content: str | list[Text]


class Tool(TypedDict):
    type: NotRequired[str | None]
    name: str
    description: NotRequired[str | None]
    input_schema: NotRequired[dict[str, Any] | None]


class ToolChoice(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class Format(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict):
    format: NotRequired[Format | None]


class MessagesBody(TypedDict):
    system: NotRequired[str | list[Text] | None]
    messages: Annotated[
        list[Annotated[User | Assistant | System, Field(discriminator="role")]], Field(min_length=1)
    ]
    tools: NotRequired[list[Tool] | None]
    tool_choice: NotRequired[ToolChoice | None]
    output_config: NotRequired[OutputConfig | None]
    output_format: NotRequired[Format | None]
    stream: NotRequired[bool | None]
    mcp_servers: NotRequired[list[Any] | None]


BODY: TypeAdapter[Any] = TypeAdapter(MessagesBody)
