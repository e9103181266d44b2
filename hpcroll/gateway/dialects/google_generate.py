"""Gemini generateContent: https://ai.google.dev/api/generate-content."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hpcroll.gateway.arguments import arguments_object
from hpcroll.gateway.chat import ChatRequest, Delta, Message, Reply, assistant_message
from hpcroll.gateway.dialects.base import SSE, Caller, HttpCall, unsupported_content
from hpcroll.gateway.dialects.google_shape import BODY
from hpcroll.gateway.dialects.sampling import read_sampling
from hpcroll.gateway.dialects.shape import check
from hpcroll.gateway.refusal import CONTEXT_CODE, Refusal, bad_request

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
}
_SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_OPAQUE = frozenset(
    {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}
)
"""Fields whose content is the agent's own."""
_ANY_VERSION = "/{version:v1|v1alpha|v1beta}/models/{model}"


class GoogleGenerate:
    """`POST /v1beta/models/MODEL:generateContent`, `:streamGenerateContent` and `:countTokens`."""

    name: ClassVar[str] = "google_generate"
    calls: ClassVar[tuple[str, ...]] = (
        f"{_ANY_VERSION}:generateContent",
        f"{_ANY_VERSION}:streamGenerateContent",
    )
    counts: ClassVar[tuple[str, ...]] = (f"{_ANY_VERSION}:countTokens",)

    def __init__(self, model: str) -> None:
        self._model = model

    def read(self, call: HttpCall) -> Caller:
        stream = call.route.endswith(":streamGenerateContent")
        events = call.query.get("alt") == "sse"
        return _GenerateCaller(read_request(call.body, stream=stream), model=self._model, events=events)

    def read_count(self, call: HttpCall) -> ChatRequest:
        body = _camel_case(call.body)
        return read_request(body.get("generateContentRequest") or body, stream=False)

    def count(self, tokens: int) -> Mapping[str, Any]:
        return {"totalTokens": tokens}

    def refusal(self, refusal: Refusal) -> Mapping[str, Any]:
        return _error(refusal)

    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        model = {
            "name": f"models/{self._model}",
            "displayName": self._model,
            "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
        }
        return {"/v1beta/models": {"models": [model]}, "/v1beta/models/{model}": model}


def _error(refusal: Refusal) -> dict[str, Any]:
    message = refusal.message
    if refusal.code == CONTEXT_CODE:
        # The words and numbers by which clients know it.
        found, longest = ("?", "?") if (it := refusal.lengths) is None else (it.found, it.longest)
        message = f"The input token count ({found}) exceeds the maximum number of tokens allowed ({longest})."
    status = _STATUSES.get(refusal.status, "UNAVAILABLE")
    reason = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": refusal.code,
        "domain": "hpcroll",
    }
    return {"error": {"code": refusal.status, "message": message, "status": status, "details": [reason]}}


def read_request(body: Mapping[str, Any], *, stream: bool) -> ChatRequest:
    """The request in `body`; raises `Refusal` that names what is wrong or not supported."""
    body = _camel_case(body)
    check(body, BODY)
    if body.get("cachedContent"):
        raise _unsupported("cachedContent", "nothing is stored between requests")
    messages: list[Message] = []
    if text := _system_text(body.get("systemInstruction")):
        messages.append({"role": "system", "content": text})
    unanswered: list[tuple[str, str]] = []
    for index, content in enumerate(body["contents"]):
        messages += _messages(content, f"contents[{index}]", unanswered)
    config = body.get("generationConfig") or {}
    _check_config(config)
    tools = _tools(body.get("tools") or ())
    passed_on, constraints = _choice(body.get("toolConfig") or {}, tools)
    if config.get("responseMimeType") == "application/json":
        schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema") or {})
        constraints["response_format"] = (
            {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
            if schema
            else {"type": "json_object"}
        )
    return ChatRequest(
        messages=tuple(messages),
        stream=stream,
        tools=tuple(tools),
        asked=read_sampling(config, _SAMPLING, within="generationConfig."),
        constraints=constraints,
        passed_on=passed_on,
    )


def _camel_case(value: Any) -> Any:
    """The request with one spelling of its fields: the API takes `tool_config` for `toolConfig`."""
    if isinstance(value, list):
        return [_camel_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        (own := _camel(name) if "_" in name else name): (
            item if isinstance(item, str) or own in _OPAQUE else _camel_case(item)
        )
        for name, item in value.items()
    }


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.title() for word in others)


def _unsupported(field: str, why: str) -> Refusal:
    return bad_request(f"{field}: not supported, {why}", code="unsupported", param=field)


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("candidateCount") not in (None, 1):
        raise _unsupported("generationConfig.candidateCount", "a rollout is one sequence of calls")
    if set(config.get("responseModalities") or ()) - {"TEXT"}:
        raise _unsupported("generationConfig.responseModalities", "hpcroll records text only")
    if config.get("responseMimeType") not in (None, "", "text/plain", "application/json"):
        raise _unsupported("generationConfig.responseMimeType", "only text/plain and application/json are")


def _system_text(system: str | Mapping[str, Any] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    for place, part in enumerate(system["parts"]):
        if part.get("text") is None:
            raise unsupported_content(_kind(part), f"systemInstruction.parts[{place}]")
    return "\n\n".join(part["text"] for part in system["parts"])


def _choice(
    config: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is passed on, and what constrains sampling, of a `toolConfig`."""
    calling = config.get("functionCallingConfig") or {}
    mode = str(calling.get("mode") or "AUTO").upper()
    names: Sequence[str] = calling.get("allowedFunctionNames") or ()
    if len(names) > 1 and set(names) < {tool["function"]["name"] for tool in tools}:
        field = "toolConfig.functionCallingConfig.allowedFunctionNames"
        raise _unsupported(field, "no server takes a choice of some functions; declare only those")
    if mode == "NONE":
        return {"tool_choice": "none"}, {}
    if mode != "ANY":
        return {}, {}
    if len(names) == 1:
        return {}, {"tool_choice": {"type": "function", "function": {"name": names[0]}}}
    return {}, {"tool_choice": "required"}


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The declared functions; tools that Google's servers run are not offered."""
    functions = []
    for tool in tools:
        for declared in tool.get("functionDeclarations") or ():
            parameters = declared.get("parametersJsonSchema") or _json_schema(
                declared.get("parameters") or {}
            )
            function = {
                "name": declared["name"],
                "description": declared.get("description") or "",
                "parameters": parameters or {"type": "object", "properties": {}},
            }
            functions.append({"type": "function", "function": function})
    return functions


def _json_schema(schema: Any) -> Any:
    """An OpenAPI schema as Google writes it, with JSON Schema's names of types."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else _json_schema(value)
        for name, value in schema.items()
    }


def _messages(content: Mapping[str, Any], where: str, unanswered: list[tuple[str, str]]) -> list[Message]:
    """The messages of one content; `unanswered` are the (id, name) of calls whose results are to come."""
    if content.get("role") == "model":
        return [_assistant(content["parts"], where, unanswered)]
    messages: list[Message] = []
    for place, part in enumerate(content["parts"]):
        if answer := part.get("functionResponse"):
            if answer.get("parts"):
                raise unsupported_content("functionResponse.parts", f"{where}.parts[{place}]")
            messages.append(_result(answer, unanswered))
        elif part.get("text") is None:
            raise unsupported_content(_kind(part), f"{where}.parts[{place}]")
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += part["text"]
        else:
            messages.append({"role": "user", "content": part["text"]})
    return messages


def _assistant(parts: Sequence[Mapping[str, Any]], where: str, unanswered: list[tuple[str, str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for place, part in enumerate(parts):
        if called := part.get("functionCall"):
            call_id = called.get("id") or f"{where}.parts[{place}]"
            arguments = json.dumps(called.get("args") or {}, ensure_ascii=False)
            function = {"name": called["name"], "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
            unanswered.append((call_id, called["name"]))
        elif part.get("text") is not None:
            (thoughts if part.get("thought") else texts).append(part["text"])
        else:
            raise unsupported_content(_kind(part), f"{where}.parts[{place}]")
    return assistant_message("".join(texts), "".join(thoughts), calls)


def _result(answer: Mapping[str, Any], unanswered: list[tuple[str, str]]) -> Message:
    # Older clients send no ids: then results come in the order of their calls.
    name = answer.get("name") or ""
    known = next((call for call in unanswered if call[0] == answer.get("id")), None)
    known = known or next((call for call in unanswered if call[1] == name), None)
    if known is not None:
        unanswered.remove(known)
    response = answer["response"]
    # The one key under which clients put text.
    text = response.get("output") if len(response) == 1 else None
    content = text if isinstance(text, str) else json.dumps(response, ensure_ascii=False)
    call_id = known[0] if known is not None else answer.get("id") or name
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _kind(part: Mapping[str, Any]) -> str:
    return next((name for name in part if name not in ("thoughtSignature", "thought")), "nothing")


class _GenerateCaller:
    def __init__(self, request: ChatRequest, *, model: str, events: bool) -> None:
        self.request = request
        self.content_type = SSE if events else "application/json"
        self._events = events
        self._head = {"modelVersion": model, "responseId": uuid.uuid4().hex}
        self._sent = 0

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        return self._response([*_texts(reply.reasoning, reply.content), *_calls(reply)], reply)

    def opening(self, prompt_tokens: int) -> bytes:
        return b"" if self._events else b"["

    def delta(self, delta: Delta) -> bytes:
        parts = _texts(delta.reasoning, delta.content)
        # Calls follow whole, in the closing: this API sends no pieces of them.
        return self._piece(self._response(parts, None)) if parts else b""

    def closing(self, reply: Reply) -> bytes:
        last = self._piece(self._response(_calls(reply) or [{"text": ""}], reply))
        return last if self._events else last + b"]"

    def broken(self, refusal: Refusal) -> bytes:
        last = self._piece(_error(refusal))
        return last if self._events else last + b"]"

    def _response(self, parts: Sequence[Mapping[str, Any]], reply: Reply | None) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
        response: dict[str, Any] = {"candidates": [candidate], **self._head}
        if reply is not None:
            candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
            response["usageMetadata"] = {
                "promptTokenCount": reply.prompt_tokens,
                "candidatesTokenCount": reply.completion_tokens,
                "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
            }
        return response

    def _piece(self, data: Mapping[str, Any]) -> bytes:
        text = json.dumps(data).encode()
        first, self._sent = self._sent == 0, self._sent + 1
        if self._events:
            return b"data: " + text + b"\r\n\r\n"
        return text if first else b"," + text


def _texts(reasoning: str, content: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"text": reasoning, "thought": True}] if reasoning else []
    return [*parts, {"text": content}] if content else parts


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "functionCall": {
                "id": call["id"],
                "name": call["function"]["name"],
                "args": arguments_object(call["function"]["arguments"]),
            }
        }
        for call in reply.tool_calls
    ]
