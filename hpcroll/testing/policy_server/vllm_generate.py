"""vLLM's tokens in, tokens out.

After vllm-project/vllm, `vllm/entrypoints/serve/disagg/serving.py` and `protocol.py`: `token_ids`,
`sampling_params`, `stream`; choices hold `token_ids` and chat-shaped `logprobs` whose tokens are spelt
`token_id:N`; a stream ends with `[DONE]`. Without `max_tokens` a reply may fill the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcroll.testing.policy_server.completions import CompletionsWire, engine_finish
from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.template import Template
from hpcroll.testing.policy_server.wire import Event, read_ids


class VllmGenerateWire:
    """`POST /inference/v1/generate`."""

    name = "vllm_generate"
    path = "/inference/v1/generate"

    def read_prompt(self, body: Mapping[str, Any], template: Template, *, session: str) -> list[int]:
        return read_ids(body["token_ids"])

    def read_max_tokens(self, body: Mapping[str, Any], room: int) -> int | None:
        wanted = body["sampling_params"].get("max_tokens")
        return None if wanted is None else int(wanted)

    def whole(self, out: Outgoing) -> dict[str, Any]:
        choice = self._choice(out, 0, len(out.reply.ids), ends=True)
        head = {**out.head("generate"), "request_id": out.request_id}
        return {
            **head,
            "choices": [choice],
            "usage": out.usage(),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }

    def events(self, out: Outgoing) -> Iterator[Event]:
        length = len(out.reply.ids)
        for stop in range(1, length + 1):
            choice = self._choice(out, stop - 1, stop, ends=stop == length)
            yield Event({**self._head(out), "choices": [choice]}, stop, ends=stop == length)
        if out.wants_usage:
            yield Event({**self._head(out), "choices": [], "usage": out.usage()}, length)
        yield Event(None, length)

    def refuse(self, *, context: int, prompt: int, wanted: int) -> str:
        return CompletionsWire().refuse(context=context, prompt=prompt, wanted=wanted)

    def _head(self, out: Outgoing) -> dict[str, Any]:
        return {"request_id": out.request_id, **out.weight_version()}

    def _choice(self, out: Outgoing, start: int, stop: int, *, ends: bool) -> dict[str, Any]:
        return {
            "index": 0,
            "logprobs": self._logprobs(out, start, stop),
            "finish_reason": engine_finish(out.reply) if ends else None,
            "token_ids": out.token_ids(start, stop),
        }

    def _logprobs(self, out: Outgoing, start: int, stop: int) -> dict[str, Any] | None:
        values = out.logprobs(start, stop)
        if out.body["sampling_params"].get("logprobs") is None or values is None:
            return None
        names = [f"token_id:{token_id}" for token_id in out.reply.ids[start:stop]]
        return {
            "content": [
                {
                    "token": name,
                    "logprob": value,
                    "bytes": None,
                    "top_logprobs": [{"token": name, "logprob": value, "bytes": None}],
                }
                for name, value in zip(names, values, strict=True)
            ]
        }
