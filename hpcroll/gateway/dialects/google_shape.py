"""What is read of a request to Gemini's generateContent, with the names of fields in camelCase."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict


class FunctionCall(TypedDict):
    id: NotRequired[str | None]
    name: str
    args: NotRequired[dict[str, Any] | None]


class FunctionResponse(TypedDict):
    id: NotRequired[str | None]
    name: NotRequired[str | None]
    response: dict[str, Any]
    parts: NotRequired[list[Any] | None]


class Part(TypedDict):
    """One of these; what else a part may be is refused as content."""

    text: NotRequired[str | None]
    thought: NotRequired[bool | None]
    functionCall: NotRequired[FunctionCall | None]
    functionResponse: NotRequired[FunctionResponse | None]


class Content(TypedDict):
    role: NotRequired[Literal["user", "model", "function"] | None]
    parts: Annotated[list[Part], Field(min_length=1)]


class SystemInstruction(TypedDict):
    parts: list[Part]


class FunctionDeclaration(TypedDict):
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    parametersJsonSchema: NotRequired[dict[str, Any] | None]


class Tool(TypedDict):
    functionDeclarations: NotRequired[list[FunctionDeclaration] | None]


class FunctionCallingConfig(TypedDict):
    mode: NotRequired[str | None]
    allowedFunctionNames: NotRequired[list[str] | None]


class ToolConfig(TypedDict):
    functionCallingConfig: NotRequired[FunctionCallingConfig | None]


class GenerationConfig(TypedDict):
    candidateCount: NotRequired[int | None]
    responseMimeType: NotRequired[str | None]
    responseModalities: NotRequired[list[str] | None]
    responseSchema: NotRequired[dict[str, Any] | None]
    responseJsonSchema: NotRequired[dict[str, Any] | None]


class GenerateBody(TypedDict):
    systemInstruction: NotRequired[str | SystemInstruction | None]
    contents: Annotated[list[Content], Field(min_length=1)]
    tools: NotRequired[list[Tool] | None]
    toolConfig: NotRequired[ToolConfig | None]
    generationConfig: NotRequired[GenerationConfig | None]


BODY: TypeAdapter[Any] = TypeAdapter(GenerateBody)
