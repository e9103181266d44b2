"""Constraints on sampling, from the words of the chat APIs into those of an engine that is given ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

_VLLM_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


def for_vllm(constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`. A forced choice of tool has none: it is left to the model."""
    outputs: dict[str, Any] = dict(constraints.get("structured_outputs") or {})
    for name, value in constraints.items():
        if name in _VLLM_KINDS:
            outputs.setdefault(_VLLM_KINDS[name], value)
    schema = _schema(constraints)
    if schema is not None:
        outputs.setdefault(*(("json", schema) if schema else ("json_object", True)))
    return _bias(constraints) | ({"structured_outputs": outputs} if outputs else {})


def for_sglang(constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SGLang's `sampling_params`. A forced choice of tool has none: it is left to the model."""
    outputs: Mapping[str, Any] = constraints.get("structured_outputs") or {}
    schema = next(
        (
            value
            for value in (
                constraints.get("json_schema"),
                constraints.get("guided_json"),
                outputs.get("json"),
                {"type": "object"} if outputs.get("json_object") else None,
                {"type": "object"} if _schema(constraints) == {} else _schema(constraints),
            )
            if value is not None
        ),
        None,
    )
    fields = {
        "json_schema": schema if schema is None or isinstance(schema, str) else to_json(schema).decode(),
        "regex": constraints.get("regex") or constraints.get("guided_regex") or outputs.get("regex"),
        "ebnf": constraints.get("ebnf") or constraints.get("guided_grammar") or outputs.get("grammar"),
    }
    return _bias(constraints) | {name: value for name, value in fields.items() if value is not None}


def _schema(constraints: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema of a response format: empty where any object will do, None where there is no format."""
    form = constraints.get("response_format") or {}
    if form.get("type") == "json_schema":
        return dict((form.get("json_schema") or {}).get("schema") or {})
    return {} if form.get("type") == "json_object" else None


def _bias(constraints: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_bias": constraints["logit_bias"]} if constraints.get("logit_bias") else {}
