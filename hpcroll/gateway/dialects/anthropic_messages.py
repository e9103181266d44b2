"""Anthropic Messages: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hpcroll.gateway.arguments import UNPARSED, arguments_object
from hpcroll.gateway.chat import ChatRequest, Delta, Message, Reply, assistant_message
from hpcroll.gateway.dialects.anthropic_shape import BODY
from hpcroll.gateway.dialects.base import SSE, Caller, HttpCall
from hpcroll.gateway.dialects.sampling import read_sampling
from hpcroll.gateway.dialects.shape import check
from hpcroll.gateway.refusal import CONTEXT_CODE, Refusal, bad_request

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SAMPLING = {name: name for name in ("max_tokens", "temperature", "top_p", "top_k")} | {
    "stop_sequences": "stop"
}
_SIGNATURE = "hpcroll"
"""Clients send thinking back only with a signature; nobody checks it here."""


class AnthropicMessages:
    """`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

    name: ClassVar[str] = "anthropic_messages"
    calls: ClassVar[tuple[str, ...]] = ("/v1/messages",)
    counts: ClassVar[tuple[str, ...]] = ("/v1/messages/count_tokens",)

    def __init__(self, model: str) -> None:
        self._model = model

    def read(self, call: HttpCall) -> Caller:
        request = read_request(call.body)
        if call.body["messages"][-1]["role"] == "assistant":
            message = "messages: prefill of a reply is not supported, the last message must be the user's"
            raise bad_request(message, code="unsupported", param="messages")
        return _MessagesCaller(request, model=self._model)

    def read_count(self, call: HttpCall) -> ChatRequest:
        return read_request(call.body)

    def count(self, tokens: int) -> Mapping[str, Any]:
        return {"input_tokens": tokens}

    def refusal(self, refusal: Refusal) -> Mapping[str, Any]:
        return _error(refusal)

    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        return {}  # GET /v1/models is answered for OpenAI's and Anthropic's clients alike


def _error(refusal: Refusal) -> dict[str, Any]:
    message = refusal.message
    if refusal.code == CONTEXT_CODE:
        # The words and numbers by which clients know it.
        lengths = refusal.lengths
        numbers = f"{lengths.found} tokens > {lengths.longest} maximum" if lengths else message
        message = f"prompt is too long: {numbers}"
    kind = _ERRORS.get(refusal.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": refusal.code}}


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request in `body`; raises `Refusal` that names what is wrong or not supported."""
    check(body, BODY)
    if body.get("mcp_servers"):
        message = "mcp_servers: not supported, only tools that the agent runs itself"
        raise bad_request(message, code="unsupported", param="mcp_servers")
    messages: list[Message] = []
    if system := _text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _messages(message)
    passed_on: dict[str, Any] = {}
    constraints = _constraints(body)
    choice = body.get("tool_choice") or {}
    if choice.get("type") == "none":
        passed_on["tool_choice"] = "none"
    if choice.get("disable_parallel_tool_use"):
        passed_on["parallel_tool_calls"] = False
    return ChatRequest(
        messages=tuple(messages),
        stream=bool(body.get("stream")),
        tools=tuple(_tool(tool, index) for index, tool in enumerate(body.get("tools") or ())),
        asked=read_sampling(body, _SAMPLING),
        constraints=constraints,
        passed_on=passed_on,
    )


def _constraints(body: Mapping[str, Any]) -> dict[str, Any]:
    constraints: dict[str, Any] = {}
    choice = body.get("tool_choice") or {}
    if choice.get("type") == "any":
        constraints["tool_choice"] = "required"
    elif choice.get("type") == "tool":
        if not choice.get("name"):
            raise bad_request("tool_choice.name: missing", param="tool_choice.name")
        constraints["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    form = (body.get("output_config") or {}).get("format") or body.get("output_format")
    if form:
        schema = {"name": "output", "schema": form["schema"]}
        constraints["response_format"] = {"type": "json_schema", "json_schema": schema}
    return constraints


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom" or tool.get("input_schema") is None:
        raise bad_request(
            f"tools[{index}] of type {kind!r} is not supported: only tools that the agent runs itself "
            "(a name and an input_schema)",
            code="unsupported",
            param=f"tools[{index}]",
        )
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any]) -> list[Message]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_assistant(blocks)] if message["role"] == "assistant" else _user(blocks, message["role"])


def _assistant(blocks: Iterable[Mapping[str, Any]]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        else:
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
    return assistant_message("".join(texts), "".join(thoughts), calls)


def _user(blocks: Iterable[Mapping[str, Any]], role: str) -> list[Message]:
    """Tool results as messages of their own; the text between them in its place."""
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": role, "content": "\n\n".join(texts)})
            texts.clear()

    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
        else:
            flush()
            content = _text(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    flush()
    return messages


def _text(content: str | Iterable[Mapping[str, Any]] | None) -> str:
    return content if isinstance(content, str) else "\n\n".join(block["text"] for block in content or ())


class _MessagesCaller:
    content_type = SSE

    def __init__(self, request: ChatRequest, *, model: str) -> None:
        self.request = request
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0
        """Blocks begun; the last of them is open where `_open` names its kind."""
        self._open: str | int | None = None
        """`text`, `thinking`, or the index of the open tool call."""

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _SIGNATURE})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.tool_calls:
            function = call["function"]
            shown = arguments_object(function["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": shown})
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
        return {**self._head(usage), "content": content, **_ending(reply)}

    def opening(self, prompt_tokens: int) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        return _event({"type": "message_start", "message": self._head(usage)})

    def delta(self, delta: Delta) -> bytes:
        events = []
        if delta.reasoning:
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._add({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._add({"type": "text_delta", "text": delta.content}))
        # Calls follow whole, in the closing: an agent acts upon them only once the call is recorded.
        return b"".join(events)

    def closing(self, reply: Reply) -> bytes:
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
        end = [
            _event({"type": "message_delta", "delta": _ending(reply), "usage": usage}),
            _event({"type": "message_stop"}),
        ]
        return b"".join([*self._calls(reply), *self._end(), *end])

    def broken(self, refusal: Refusal) -> bytes:
        return _event(_error(refusal))

    def _head(self, usage: Mapping[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _calls(self, reply: Reply) -> list[bytes]:
        events = []
        for index, call in enumerate(reply.tool_calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            events += self._begin(index, {"type": "tool_use", "id": call["id"], "name": name, "input": {}})
            shown = arguments_object(arguments)
            text = json.dumps(shown) if UNPARSED in shown else arguments
            events.append(self._add({"type": "input_json_delta", "partial_json": text}))
        return events

    def _begin(self, kind: str | int, block: Mapping[str, Any]) -> list[bytes]:
        if self._open == kind:
            return []
        events = self._end()
        self._open = kind
        self._blocks += 1
        start = {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}
        return [*events, _event(start)]

    def _add(self, delta: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _end(self) -> list[bytes]:
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._add({"type": "signature_delta", "signature": _SIGNATURE}))
        self._open = None
        return [*events, _event({"type": "content_block_stop", "index": self._blocks - 1})]


def _ending(reply: Reply) -> dict[str, Any]:
    if reply.stop is not None and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
