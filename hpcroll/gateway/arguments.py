"""Arguments of tool calls: the text that was sampled, and the values that agents make of it."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

UNPARSED = "unparsed_arguments"
"""The one key of the object that stands for arguments which are no JSON object."""

TEXT_ARGUMENT = "input"
"""The one argument of a tool that takes text: the function that stands for it has this parameter."""


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; text that is none under the key `UNPARSED`.

    Nor is text that cannot be written as JSON again: NaN, 1e999, half of a surrogate pair.
    """
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
        if isinstance(value, dict):
            json.dumps(value, allow_nan=False)
            return value
    except ValueError:
        pass
    return {UNPARSED: text}


def text_argument(arguments: str) -> str:
    """The text that a call of a tool which takes text hands over; arguments of another form as they stand."""
    text = arguments_object(arguments).get(TEXT_ARGUMENT)
    return text if isinstance(text, str) else arguments


def takes_text(schema: Any) -> bool:
    """Whether the parameters `schema` are those of a tool that takes text."""
    return isinstance(schema, dict) and list(_members(schema)) == [TEXT_ARGUMENT]


def with_defaults(value: Any, schema: Any) -> Any:
    """`value` with what `schema` declares as default wherever it says nothing."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [with_defaults(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    members = _members(schema)
    filled = {
        name: inner["default"]
        for name, inner in members.items()
        if isinstance(inner, dict) and "default" in inner
    }
    return {**filled, **{name: with_defaults(item, members.get(name)) for name, item in value.items()}}


def _members(schema: Any) -> dict[str, Any]:
    members = schema.get("properties") if isinstance(schema, dict) else None
    return members if isinstance(members, dict) else {}


def same_json(left: Any, right: Any) -> bool:
    """Equality of JSON values; numbers are equal where one IEEE double stands for both."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left == right or _same_double(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return type(left) is type(right) and bool(left == right)


def _same_double(left: float, right: float) -> bool:
    try:
        return float(left) == float(right)
    except OverflowError:
        return False
