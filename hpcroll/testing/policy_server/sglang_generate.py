"""SGLang's native endpoint.

After sgl-project/sglang, `python/sglang/srt/managers/tokenizer_manager.py` and `io_struct.py`: `input_ids`,
`sampling_params` (`max_new_tokens`), `return_logprob`, `stream`; `meta_info` holds the finish reason as an
object, the weight version, and `output_token_logprobs` as triples of log-probability, id and null. Events of
a stream hold all text and ids so far, unless the server streams incrementally. Without `max_new_tokens` a
reply has at most 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.template import Template
from hpcroll.testing.policy_server.vocabulary import decode, texts
from hpcroll.testing.policy_server.wire import Event, read_ids

_DEFAULT_MAX_TOKENS = 128


class SglangGenerateWire:
    """`POST /generate`."""

    name = "sglang_generate"
    path = "/generate"

    def read_prompt(self, body: Mapping[str, Any], template: Template, *, session: str) -> list[int]:
        return read_ids(body["input_ids"])

    def read_max_tokens(self, body: Mapping[str, Any], room: int) -> int | None:
        wanted = (body.get("sampling_params") or {}).get("max_new_tokens", _DEFAULT_MAX_TOKENS)
        return None if wanted is None else int(wanted)

    def whole(self, out: Outgoing) -> dict[str, Any]:
        return self._body(out, decode(out.vocabulary, out.reply.ids), 0, len(out.reply.ids))

    def events(self, out: Outgoing) -> Iterator[Event]:
        length = len(out.reply.ids)
        text = ""
        for stop, new in enumerate(texts(out.vocabulary, out.reply.ids), start=1):
            text = new if out.incremental else text + new
            start = stop - 1 if out.incremental else 0
            yield Event(self._body(out, text, start, stop), stop, ends=stop == length)
        yield Event(None, length)

    def refuse(self, *, context: int, prompt: int, wanted: int) -> str:
        if prompt >= context:
            return (
                f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        return (
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
            f"requested a total of {prompt + wanted} tokens: {prompt} tokens from the input messages and "
            f"{wanted} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )

    def _body(self, out: Outgoing, text: str, start: int, stop: int) -> dict[str, Any]:
        ids = out.token_ids(start, stop)
        meta = {
            "id": out.request_id,
            "finish_reason": self._finish(out) if stop == len(out.reply.ids) else None,
            "prompt_tokens": out.usage()["prompt_tokens"],
            "completion_tokens": stop,
            "cached_tokens": 0,
            **out.weight_version(),
        }
        if stop == len(out.reply.ids):
            meta["completion_tokens"] = out.usage()["completion_tokens"]
        values = out.logprobs(start, stop)
        if out.body.get("return_logprob") and values is not None:
            pairs = zip(values, out.reply.ids[start:stop], strict=True)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [value, token_id if ids is not None else None, None] for value, token_id in pairs
            ]
        return {"text": text, **({} if ids is None else {"output_ids": ids}), "meta_info": meta}

    def _finish(self, out: Outgoing) -> dict[str, Any]:
        if out.reply.finish_reason == "length":
            return {"type": "length", "length": len(out.reply.ids)}
        return {"type": "stop", "matched": out.reply.ids[-1]}
