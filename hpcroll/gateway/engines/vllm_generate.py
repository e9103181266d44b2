"""Tokens in, tokens out, as vLLM serves them: `vllm serve --enable-scale-out`.

Of vLLM's endpoints the one that says which weights sampled which token. Measured with vLLM 0.32:
`choices[].weight_versions` holds spans over the reply's ids; a stream says them with its finish reason.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic_core import to_json

from hpcroll.contract import VersionSpan
from hpcroll.gateway.engines.base import Part, Question, Reading, decimal, text_or_none, versions_of
from hpcroll.gateway.engines.constraints import for_vllm


class VllmGenerate:
    """`POST /inference/v1/generate`."""

    path: ClassVar[str] = "/inference/v1/generate"

    def body(self, question: Question, *, model: str) -> bytes:
        assert question.prompt_ids is not None, "this engine is given ids"
        sampling = question.sampling.model_dump(exclude_none=True)
        body: dict[str, Any] = {
            "model": model,
            "token_ids": question.prompt_ids.tolist(),
            "sampling_params": {
                **sampling,
                **for_vllm(question.request.constraints),
                "logprobs": 0,
                "stop_token_ids": list(question.stop_ids),
                "skip_special_tokens": False,
            },
            "stream": question.request.stream,
            "return_token_ids": True,
        }
        if question.request.stream:
            body["stream_options"] = {"include_usage": True}
        return to_json(body)

    def reading(self, *, stream: bool) -> Reading:
        return _GenerateReading()


class _GenerateReading:
    def take(self, data: Any) -> Part:
        choices = data.get("choices") or [{}]
        choice = choices[0]
        spans = tuple(
            VersionSpan(start=span["start"], length=span["end"] - span["start"], version=version)
            for span in choice.get("weight_versions") or ()
            if (version := decimal(span["version"])) is not None
        )
        content = (choice.get("logprobs") or {}).get("content") or ()
        return Part(
            ids=choice.get("token_ids") or (),
            logprobs=[float(entry["logprob"]) for entry in content],
            prompt_ids=data.get("prompt_token_ids"),
            finish_reason=choice.get("finish_reason"),
            stop=text_or_none(choice.get("stop_reason")),
            versions=(*versions_of(data, choice), *(span.version for span in spans)),
            spans=spans,
            usage=data.get("usage"),
        )
