"""SGLang's native endpoint: https://docs.sglang.io/basic_usage/native_api.html.

Events of a stream hold everything so far, or what is new alone where the server was started with
`--incremental-streaming-output`; `completion_tokens`, which always counts everything, tells which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic_core import to_json

from hpcroll.gateway.engines.base import Part, Question, Reading, text_or_none, versions_of
from hpcroll.gateway.engines.constraints import for_sglang

_RENAMED = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}


class SglangGenerate:
    """`POST /generate`."""

    path: ClassVar[str] = "/generate"

    def body(self, question: Question, *, model: str) -> bytes:
        assert question.prompt_ids is not None, "this engine is given ids"
        sampling = question.sampling.model_dump(exclude_none=True)
        return to_json(
            {
                "input_ids": question.prompt_ids.tolist(),
                "sampling_params": {
                    **{_RENAMED.get(name, name): value for name, value in sampling.items()},
                    **for_sglang(question.request.constraints),
                    "stop_token_ids": list(question.stop_ids),
                    "skip_special_tokens": False,
                    # Otherwise the token that ended the reply is missing from it.
                    "no_stop_trim": True,
                },
                "return_logprob": True,
                "stream": question.request.stream,
            }
        )

    def reading(self, *, stream: bool) -> Reading:
        return _GenerateReading()


class _GenerateReading:
    def __init__(self) -> None:
        self._seen = 0

    def take(self, data: Any) -> Part:
        meta = data["meta_info"]
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            raise ValueError(f"the server aborted it: {finish.get('message') or 'no reason given'}")
        triples = meta.get("output_token_logprobs") or ()
        ids = data.get("output_ids")
        if ids is None:
            ids = [triple[1] for triple in triples]
        total = meta["completion_tokens"]
        new = self._new(ids, total)
        values = triples[len(triples) - len(new) :] if len(triples) >= len(new) else triples
        if any(
            triple[1] is not None and triple[1] != token for triple, token in zip(values, new, strict=False)
        ):
            raise ValueError("log-probabilities of other ids than those of the reply")
        self._seen += len(new)
        return Part(
            ids=new,
            logprobs=[float(triple[0]) for triple in values],
            finish_reason=finish.get("type"),
            stop=text_or_none(finish.get("matched")),
            versions=versions_of(meta),
            usage={"prompt_tokens": meta["prompt_tokens"], "completion_tokens": total},
        )

    def _new(self, ids: Sequence[int], total: int) -> Sequence[int]:
        if self._seen and len(ids) >= total:
            return ids[self._seen :]
        return ids
