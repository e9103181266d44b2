"""OpenAI Completions over token ids, as vLLM speaks them.

After vllm-project/vllm, `vllm/entrypoints/openai/completion/serving.py` and `protocol.py`: `prompt` is a
list of ids; with `return_token_ids` the choice holds `prompt_token_ids` (of a stream: in its first event)
and `token_ids` (of a stream: the new ones); `logprobs` is a number, and comes back as parallel lists; the
last event with ids holds the finish reason. Without `max_tokens` a reply has at most 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.reply import Reply
from hpcroll.testing.policy_server.template import Template
from hpcroll.testing.policy_server.vocabulary import decode, texts
from hpcroll.testing.policy_server.wire import Event, read_ids

_DEFAULT_MAX_TOKENS = 16


class CompletionsWire:
    """`POST /v1/completions`."""

    name = "completions"
    path = "/v1/completions"

    def read_prompt(self, body: Mapping[str, Any], template: Template, *, session: str) -> list[int]:
        return read_ids(body["prompt"])

    def read_max_tokens(self, body: Mapping[str, Any], room: int) -> int | None:
        wanted = body.get("max_tokens", _DEFAULT_MAX_TOKENS)
        return None if wanted is None else int(wanted)

    def whole(self, out: Outgoing) -> dict[str, Any]:
        ids = out.reply.ids
        choice = self._choice(out, decode(out.vocabulary, ids), 0, len(ids), offset=0)
        return {**out.head("text_completion"), "choices": [choice], "usage": out.usage()}

    def events(self, out: Outgoing) -> Iterator[Event]:
        length = len(out.reply.ids)
        offset = 0
        for stop, text in enumerate(texts(out.vocabulary, out.reply.ids), start=1):
            choice = self._choice(out, text, stop - 1, stop, offset=offset)
            yield Event({**out.head("text_completion"), "choices": [choice]}, stop, ends=stop == length)
            offset += len(text)
        if out.wants_usage:
            yield Event({**out.head("text_completion"), "choices": [], "usage": out.usage()}, length)
        yield Event(None, length)

    def refuse(self, *, context: int, prompt: int, wanted: int) -> str:
        return (
            f"This model's maximum context length is {context} tokens. However, you requested {wanted} "
            f"output tokens and your prompt contains {prompt} input tokens, for a total of "
            f"{prompt + wanted} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens."
        )

    def _choice(self, out: Outgoing, text: str, start: int, stop: int, *, offset: int) -> dict[str, Any]:
        reason = engine_finish(out.reply) if stop == len(out.reply.ids) else None
        fields: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "stop_reason": None}
        fields["logprobs"] = (
            self._logprobs(out, start, stop, offset) if out.body.get("logprobs") is not None else None
        )
        if out.body.get("return_token_ids") and (ids := out.token_ids(start, stop)) is not None:
            fields["token_ids"] = ids
            fields["prompt_token_ids"] = out.prompt if start == 0 else None
        return fields

    def _logprobs(self, out: Outgoing, start: int, stop: int, offset: int) -> dict[str, Any] | None:
        values = out.logprobs(start, stop)
        if values is None:
            return None
        tokens = [piece.decode("utf-8", errors="replace") for piece in out.pieces(start, stop)]
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
        }


def engine_finish(reply: Reply) -> str:
    """Why sampling ended; an engine that is given ids knows nothing of tool calls."""
    return "length" if reply.finish_reason == "length" else "stop"
