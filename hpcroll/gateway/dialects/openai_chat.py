"""OpenAI Chat Completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic_core import to_json

from hpcroll.contract import Sampling
from hpcroll.gateway.chat import (
    ChatRequest,
    Delta,
    Reply,
    ToolCallDelta,
    assistant_message,
    thought_of,
)
from hpcroll.gateway.dialects.base import SSE, Caller, HttpCall
from hpcroll.gateway.dialects.openai_chat_shape import BODY
from hpcroll.gateway.dialects.sampling import read_sampling
from hpcroll.gateway.dialects.shape import check
from hpcroll.gateway.refusal import Refusal, bad_request

_SAMPLING = {name: name for name in Sampling.model_fields} | {"max_completion_tokens": "max_tokens"}
_OWN_FIELDS = frozenset(
    {
        *_SAMPLING,
        *("model", "messages", "tools", "tool_choice", "n"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "user"),
        *("store", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "reasoning_effort"),
        *("prediction", "verbosity", "response_format"),
    }
)
"""Read here, or of no meaning to an inference server; all others are passed on."""

_ASSISTANT_FIELDS = ("role", "content", "tool_calls", "reasoning_content", "reasoning")
_REFUSED = {
    "functions": "deprecated: declare tools",
    "function_call": "deprecated: use tool_choice",
    "use_beam_search": "a beam is not sampled",
    "audio": "hpcroll records text only",
}
_CONSTRAINING_FIELDS = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "min_new_tokens",
    "ignore_eos",
    "logits_processors",
    "custom_logit_processor",
    "vllm_xargs",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
)


class OpenAIChat:
    """`POST /v1/chat/completions` and `GET /v1/models`."""

    name: ClassVar[str] = "openai_chat"
    calls: ClassVar[tuple[str, ...]] = ("/v1/chat/completions",)
    counts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: str) -> None:
        self._model = model

    def read(self, call: HttpCall) -> Caller:
        body = call.body
        request = read_request(body)
        options = body.get("stream_options") or {}
        return _ChatCaller(
            request,
            model=self._model,
            include_usage=bool(options.get("include_usage")),
            with_logprobs=bool(body.get("logprobs")),
        )

    def read_count(self, call: HttpCall) -> ChatRequest:
        raise NotImplementedError  # the API has no such request

    def count(self, tokens: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def refusal(self, refusal: Refusal) -> Mapping[str, Any]:
        return openai_error(refusal)

    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        # Anthropic's and Google's clients ask at the same path: one answer has the fields of all three.
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "hpcroll",
            "type": "model",
            "display_name": self._model,
            "created_at": "1970-01-01T00:00:00Z",
        }
        ends = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return {
            "/v1/models": {
                "object": "list",
                "data": [model],
                **ends,
                "models": [{"name": f"models/{self._model}", "displayName": self._model}],
            },
            "/v1/models/{model}": model,
        }


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    error = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.param,
        "code": refusal.code,
    }
    return {"error": error}


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request in `body`; raises `Refusal` that names what is wrong or not supported."""
    for name, why in _REFUSED.items():
        if body.get(name):
            raise bad_request(f"{name}: not supported, {why}", code="unsupported", param=name)
    check(body, BODY)
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            message = f"{name} must be 1: a rollout is one sequence of calls"
            raise bad_request(message, code="unsupported", param=name)
    passed_on = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    constraints = {name: passed_on.pop(name) for name in _CONSTRAINING_FIELDS if passed_on.get(name)}
    if (body.get("response_format") or {}).get("type", "text") != "text":
        constraints["response_format"] = body["response_format"]
    choice = body.get("tool_choice")
    if choice == "none":
        passed_on["tool_choice"] = choice
    elif choice not in (None, "auto"):
        constraints["tool_choice"] = choice
    if isinstance(stop := body.get("stop"), str):
        body = {**body, "stop": [stop]}
    return ChatRequest(
        messages=tuple(_canonical(message) for message in body["messages"]),
        stream=bool(body.get("stream")),
        tools=tuple(body.get("tools") or ()),
        asked=read_sampling(body, _SAMPLING),
        constraints=constraints,
        passed_on=passed_on,
    )


def _canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it stands; an assistant's as replies are shown, however a client writes what is empty."""
    if message["role"] != "assistant":
        return dict(message)
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
    known = assistant_message(text, thought_of(message), message.get("tool_calls") or ())
    further = {name: value for name, value in message.items() if value and name not in _ASSISTANT_FIELDS}
    return {**known, **further}


class _ChatCaller:
    content_type = SSE

    def __init__(self, request: ChatRequest, *, model: str, include_usage: bool, with_logprobs: bool) -> None:
        self.request = request
        self._include_usage = include_usage
        self._with_logprobs = with_logprobs
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, reply: Reply) -> Mapping[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "message": reply.message,
            "finish_reason": reply.finish_reason,
        }
        if self._with_logprobs:
            choice["logprobs"] = {"content": list(reply.logprobs)}
        return {**self._head, "choices": [choice], "usage": _usage(reply)}

    def opening(self, prompt_tokens: int) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        shown: dict[str, Any] = {}
        if delta.content:
            shown["content"] = delta.content
        if delta.reasoning:
            shown["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            shown["tool_calls"] = [self._tool_call(piece) for piece in delta.tool_calls]
        return self._chunk(shown, logprobs=delta.logprobs) if shown else b""

    def closing(self, reply: Reply) -> bytes:
        last = self._chunk({}, finish_reason=reply.finish_reason)
        if self._include_usage:
            last += _event({**self._head, "choices": [], "usage": _usage(reply)})
        return last + b"data: [DONE]\n\n"

    def broken(self, refusal: Refusal) -> bytes:
        return _event(openai_error(refusal))

    def _tool_call(self, piece: ToolCallDelta) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": piece.arguments}
        if piece.name:
            function["name"] = piece.name
        shown: dict[str, Any] = {"index": piece.index, "function": function}
        if piece.id:
            shown.update(id=piece.id, type="function")
        return shown

    def _chunk(
        self,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: tuple[Mapping[str, Any], ...] = (),
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if self._with_logprobs and logprobs:
            choice["logprobs"] = {"content": list(logprobs)}
        return _event({**self._head, "choices": [choice]})


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"
