"""OpenAI Chat Completions, with token ids as vLLM returns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcroll.testing.policy_server.deltas import deltas
from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.template import Template
from hpcroll.testing.policy_server.wire import Event


class ChatWire:
    """`POST /v1/chat/completions`."""

    name = "chat"
    path = "/v1/chat/completions"

    def read_prompt(self, body: Mapping[str, Any], template: Template, *, session: str) -> list[int]:
        return template.render_prompt(body, session=session)

    def read_max_tokens(self, body: Mapping[str, Any], room: int) -> int | None:
        return body.get("max_completion_tokens") or body.get("max_tokens")

    def whole(self, out: Outgoing) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": out.reply.message(),
            "finish_reason": out.reply.finish_reason,
            **self._tokens(out, 0, len(out.reply.ids)),
        }
        return {
            **out.head("chat.completion"),
            "choices": [choice],
            "usage": out.usage(),
            **self._prompt_ids(out),
        }

    def events(self, out: Outgoing) -> Iterator[Event]:
        opening = {"role": "assistant", "content": ""}
        yield self._event(out, 0, delta=opening, extra=self._prompt_ids(out))
        for delta, start, stop in deltas(out.reply, out.vocabulary, strips_newlines=out.strips_newlines):
            yield self._event(out, stop, delta=delta, **self._tokens(out, start, stop))
        length = len(out.reply.ids)
        yield self._event(out, length, delta={}, finish_reason=out.reply.finish_reason)
        if out.wants_usage:
            data = {**out.head("chat.completion.chunk"), "choices": [], "usage": out.usage()}
            yield Event(data, length)
        yield Event(None, length)

    def refuse(self, *, context: int, prompt: int, wanted: int) -> str:
        return (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt + wanted} tokens ({prompt} in the messages, {wanted} in the completion). Please "
            "reduce the length of the messages or completion."
        )

    def _event(
        self, out: Outgoing, sent: int, *, extra: Mapping[str, Any] | None = None, **choice: Any
    ) -> Event:
        fields = {"index": 0, "finish_reason": None, **choice}
        data = {**out.head("chat.completion.chunk"), "choices": [fields], **(extra or {})}
        return Event(data, sent, ends=fields["finish_reason"] is not None)

    def _prompt_ids(self, out: Outgoing) -> dict[str, Any]:
        wanted = out.body.get("return_token_ids") and out.token_ids(0, 0) is not None
        return {"prompt_token_ids": out.prompt} if wanted else {}

    def _tokens(self, out: Outgoing, start: int, stop: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if out.body.get("return_token_ids") and (ids := out.token_ids(start, stop)) is not None:
            fields["token_ids"] = ids
        if out.body.get("logprobs"):
            fields["logprobs"] = chat_logprobs(out, start, stop)
        return fields


def chat_logprobs(out: Outgoing, start: int, stop: int) -> dict[str, Any] | None:
    """`logprobs` of the ids [start, stop), as chat replies hold them."""
    values = out.logprobs(start, stop)
    if values is None:
        return None
    return {
        "content": [
            {
                "token": piece.decode("utf-8", errors="replace"),
                "logprob": value,
                "bytes": list(piece),
                "top_logprobs": [],
            }
            for piece, value in zip(out.pieces(start, stop), values, strict=True)
        ]
    }
