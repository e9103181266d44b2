"""A Chat Completions request: what the agent asked, and what the inference server is asked instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from hpcroll.config import ModelConfig
from hpcroll.contract import Sampling, canonical_json, sha256_hex
from hpcroll.gateway.refusal import bad_request

DIALECT = "openai_chat"

_SAMPLING_FIELDS = (*Sampling.model_fields, "max_completion_tokens")
_OWN_FIELDS = frozenset(
    {*_SAMPLING_FIELDS, "model", "stream", "stream_options", "logprobs", "return_token_ids", "user"}
)
_SHAPING_FIELDS = (
    "logit_bias",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
)
"""They change the distribution that is sampled from, and no log-probability would say so."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request as the agent sent it, read and checked."""

    messages: tuple[Any, ...]
    stream: bool
    include_usage: bool
    wants_logprobs: bool
    asked: Sampling
    tools_sha256: str | None
    passed_on: Mapping[str, Any]
    """Fields that reach the server untouched (tools, tool_choice, chat_template_kwargs ...)."""


def read_request(data: bytes) -> ChatRequest:
    """The request in `data`; raises `Refusal` that names what is wrong or not supported."""
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a non-empty list", param="messages")
    for index, message in enumerate(messages):
        _check_message(message, index)
    _check_unsupported(body)
    tools = body.get("tools")
    return ChatRequest(
        messages=tuple(messages),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        wants_logprobs=bool(body.get("logprobs")),
        asked=_read_sampling(body),
        tools_sha256=sha256_hex(canonical_json(tools).encode()) if tools else None,
        passed_on={name: value for name, value in body.items() if name not in _OWN_FIELDS},
    )


def force_sampling(asked: Sampling, config: ModelConfig, *, budget: int) -> Sampling:
    """`asked`, overruled by what the config sets; `max_tokens` is at most `budget`."""
    forced = config.sampling.model_dump(exclude_none=True)
    effective = {**asked.model_dump(exclude_none=True), **forced}
    effective["max_tokens"] = min(effective.get("max_tokens", budget), budget)
    return Sampling(**effective)


def upstream_body(request: ChatRequest, sampling: Sampling, *, model: str) -> bytes:
    """The request for the inference server: sampling as decided, token ids and log-probabilities."""
    body = {
        **request.passed_on,
        **sampling.model_dump(exclude_none=True),
        "model": model,
        "messages": request.messages,
        "logprobs": True,
        "return_token_ids": True,
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    return to_json(body)


def _check_message(message: Any, index: int) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"messages[{index}] must be an object with a role", param=f"messages[{index}]")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    parts = content if isinstance(content, list) else [None]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise bad_request(
                f"messages[{index}]: content of type {kind!r} is not supported: hpcroll records text only, "
                "and a trajectory without what the model saw would be wrong",
                code="unsupported_content",
                param=f"messages[{index}].content",
            )


def _check_unsupported(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise bad_request("n must be 1: a rollout is one sequence of calls", code="unsupported", param="n")
    shaping = [name for name in _SHAPING_FIELDS if body.get(name)]
    if (body.get("response_format") or {}).get("type", "text") != "text":
        shaping.append("response_format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        shaping.append("tool_choice")
    if shaping:
        raise bad_request(
            f"{', '.join(shaping)}: not supported, because constrained sampling is not from the "
            "distribution whose log-probabilities are recorded",
            code="unsupported",
            param=shaping[0],
        )


def _read_sampling(body: Mapping[str, Any]) -> Sampling:
    fields = {name: body[name] for name in Sampling.model_fields if body.get(name) is not None}
    if (most := body.get("max_completion_tokens")) is not None:
        fields["max_tokens"] = most
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    try:
        return Sampling(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        raise bad_request(f"{name}: {first['msg']} (got {first['input']!r:.80})", param=name) from None
