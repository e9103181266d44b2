"""Completions of a prompt of ids, as any vLLM serves them.

`return_token_ids`: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, since vLLM 0.10.2.
The reply names no version of the weights; see `vllm_generate`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic_core import to_json

from hpcroll.gateway.engines.base import Part, Question, Reading, text_or_none, versions_of
from hpcroll.gateway.engines.constraints import for_vllm


class VllmCompletions:
    """`POST /v1/completions`."""

    path: ClassVar[str] = "/v1/completions"

    def body(self, question: Question, *, model: str) -> bytes:
        assert question.prompt_ids is not None, "this engine is given ids"
        body: dict[str, Any] = {
            **question.sampling.model_dump(exclude_none=True),
            **for_vllm(question.request.constraints),
            "model": model,
            "prompt": question.prompt_ids.tolist(),
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": list(question.stop_ids),
            "skip_special_tokens": False,
            "stream": question.request.stream,
        }
        if question.request.stream:
            body["stream_options"] = {"include_usage": True}
        return to_json(body)

    def reading(self, *, stream: bool) -> Reading:
        return _CompletionsReading()


class _CompletionsReading:
    def take(self, data: Any) -> Part:
        choices = data.get("choices") or [{}]
        choice = choices[0]
        values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        return Part(
            ids=choice.get("token_ids") or (),
            logprobs=[float(value) for value in values],
            prompt_ids=choice.get("prompt_token_ids") or data.get("prompt_token_ids"),
            finish_reason=choice.get("finish_reason"),
            stop=text_or_none(choice.get("stop_reason")),
            versions=versions_of(data, data.get("metadata"), choice),
            usage=data.get("usage"),
        )
