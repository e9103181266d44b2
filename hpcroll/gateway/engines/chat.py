"""Chat Completions with token ids, as vLLM serves them: the server renders the template.

`return_token_ids`: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, since vLLM 0.10.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic_core import to_json

from hpcroll.gateway.chat import Delta, ToolCallDelta, assistant_message, thought_of
from hpcroll.gateway.engines.base import Part, Question, Reading, text_or_none, versions_of


class ChatEngine:
    """`POST /v1/chat/completions`."""

    path: ClassVar[str] = "/v1/chat/completions"

    def body(self, question: Question, *, model: str) -> bytes:
        request = question.request
        body = {
            **request.passed_on,
            **request.constraints,
            **question.sampling.model_dump(exclude_none=True),
            "model": model,
            "messages": request.messages,
            "logprobs": True,
            "return_token_ids": True,
            "stream": request.stream,
        }
        if request.tools:
            body["tools"] = request.tools
        if request.stream:
            body["stream_options"] = {"include_usage": True}
        return to_json(body)

    def reading(self, *, stream: bool) -> Reading:
        return _ChatReading()


class _ChatReading:
    def take(self, data: Any) -> Part:
        choices = data.get("choices") or [{}]
        choice = choices[0]
        content = (choice.get("logprobs") or {}).get("content") or ()
        message = choice.get("message")
        return Part(
            ids=choice.get("token_ids") or (),
            logprobs=[float(entry["logprob"]) for entry in content],
            entries=content,
            prompt_ids=data.get("prompt_token_ids") or choice.get("prompt_token_ids"),
            delta=_delta(choice.get("delta") or {}, content),
            message=None if message is None else _message(message),
            finish_reason=choice.get("finish_reason"),
            stop=text_or_none(choice.get("stop_reason")),
            versions=versions_of(*_holders(data), *_holders(choice)),
            usage=data.get("usage"),
        )


def _holders(data: Mapping[str, Any]) -> tuple[Any, ...]:
    return data, data.get("metadata"), data.get("meta_info")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": call.get("id") or "", "type": "function", "function": dict(call["function"])}
        for call in message.get("tool_calls") or ()
    ]
    return assistant_message(message.get("content"), thought_of(message), calls)


def _delta(delta: Mapping[str, Any], logprobs: Any) -> Delta:
    calls = []
    for piece in delta.get("tool_calls") or ():
        function = piece.get("function") or {}
        calls.append(
            ToolCallDelta(
                index=piece.get("index", 0),
                id=piece.get("id") or "",
                name=function.get("name") or "",
                arguments=function.get("arguments") or "",
            )
        )
    return Delta(delta.get("content") or "", thought_of(delta), tuple(calls), tuple(logprobs))
