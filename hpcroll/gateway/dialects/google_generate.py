"""Gemini generateContent: https://ai.google.dev/api/generate-content."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hpcroll.gateway.chat import ChatRequest, Delta, Message, Reply, assistant_message
from hpcroll.gateway.dialects.base import SSE, Caller, HttpCall, unsupported_content
from hpcroll.gateway.dialects.sampling import read_sampling
from hpcroll.gateway.recall import arguments_object
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
        return read_request(call.body.get("generateContentRequest") or call.body, stream=False)

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
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        raise bad_request("contents must be a non-empty list", param="contents")
    if body.get("cachedContent"):
        raise bad_request("cachedContent: nothing is stored between requests", code="unsupported")
    messages: list[Message] = []
    system = body.get("systemInstruction") or body.get("system_instruction")
    if system and (text := _system_text(system)):
        messages.append({"role": "system", "content": text})
    unanswered: list[tuple[str, str]] = []
    for index, content in enumerate(contents):
        messages += _messages(content, f"contents[{index}]", unanswered)
    config = body.get("generationConfig") or {}
    if config.get("candidateCount") not in (None, 1):
        raise bad_request("candidateCount must be 1: a rollout is one sequence of calls", code="unsupported")
    fields = {ours: config[theirs] for theirs, ours in _SAMPLING.items() if config.get(theirs) is not None}
    passed_on, constraints = _choice(body.get("toolConfig") or {})
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
        tools=tuple(_tools(body.get("tools") or ())),
        asked=read_sampling(fields),
        constraints=constraints,
        passed_on=passed_on,
    )


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return system
    return "\n\n".join(part.get("text") or "" for part in system.get("parts") or ())


def _choice(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is passed on, and what constrains sampling, of a `toolConfig`."""
    calling = config.get("functionCallingConfig") or {}
    mode = str(calling.get("mode") or "AUTO").upper()
    names: Sequence[str] = calling.get("allowedFunctionNames") or ()
    if mode == "NONE":
        return {"tool_choice": "none"}, {}
    if mode != "ANY":
        return {}, {}
    if len(names) == 1:
        return {}, {"tool_choice": {"type": "function", "function": {"name": names[0]}}}
    return {}, {"tool_choice": "required"}


def _tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The declared functions; tools that Google's servers run are not offered."""
    functions = []
    for tool in tools:
        for declared in tool.get("functionDeclarations") or tool.get("function_declarations") or ():
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


def _messages(content: Any, where: str, unanswered: list[tuple[str, str]]) -> list[Message]:
    """The messages of one content; `unanswered` are the (id, name) of calls whose results are to come."""
    if not isinstance(content, dict) or not isinstance(content.get("parts"), list):
        raise bad_request(f"{where} must be an object with parts", param=where)
    role, parts = content.get("role") or "user", content["parts"]
    if role == "model":
        return [_assistant(parts, where, unanswered)]
    messages: list[Message] = []
    texts: list[str] = []
    for part in parts:
        if "functionResponse" in part:
            messages.append(_result(part["functionResponse"], unanswered))
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise unsupported_content(_kind(part), where)
    if texts:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _assistant(parts: Sequence[Any], where: str, unanswered: list[tuple[str, str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for place, part in enumerate(parts):
        if "functionCall" in part:
            called = part["functionCall"]
            call_id = called.get("id") or f"{where}.parts[{place}]"
            arguments = json.dumps(called.get("args") or {}, ensure_ascii=False)
            function = {"name": called.get("name"), "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
            unanswered.append((call_id, called.get("name") or ""))
        elif isinstance(part.get("text"), str):
            (thoughts if part.get("thought") else texts).append(part["text"])
        else:
            raise unsupported_content(_kind(part), where)
    return assistant_message("".join(texts), "".join(thoughts), calls)


def _result(answer: Mapping[str, Any], unanswered: list[tuple[str, str]]) -> Message:
    # Older clients send no ids: then results come in the order of their calls.
    name = answer.get("name") or ""
    known = next((call for call in unanswered if call[0] == answer.get("id")), None)
    known = known or next((call for call in unanswered if call[1] == name), None)
    if known is not None:
        unanswered.remove(known)
    response = answer.get("response")
    # The one key under which clients put text.
    text = response.get("output") if isinstance(response, dict) and len(response) == 1 else None
    content = text if isinstance(text, str) else json.dumps(response, ensure_ascii=False)
    call_id = known[0] if known is not None else answer.get("id") or name
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _kind(part: Any) -> str:
    names = [name for name in part if name != "thoughtSignature"] if isinstance(part, dict) else []
    return str(names[0]) if names else type(part).__name__


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
