"""Requests of another shape than their API's are refused by name, before anything reads them.

A dialect declares what it reads of a request as `TypedDict`s: the parts that it supports, and their types.
The request itself goes on as it came, fields that are not declared included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hpcroll.gateway.dialects.base import unsupported_content
from hpcroll.gateway.refusal import Refusal, bad_request

_CONTENT = frozenset({"messages", "input", "contents", "system", "systemInstruction"})
"""Fields that hold content; its parts have a `type` each."""

_SHOWN = 80
"""Characters of a wrong value that are shown."""


def check(body: Any, shape: TypeAdapter[Any]) -> None:
    """Raises `Refusal` that names the first field of `body` that has not this shape."""
    try:
        shape.validate_python(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), body) from None


def field_name(path: Sequence[int | str]) -> str:
    """A path as people write it: `messages[0].content`."""
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return name.removeprefix(".") or "the body"


def _refusal(errors: Sequence[ErrorDetails], body: Any) -> Refusal:
    # A union tells what is wrong with each alternative: the one that got furthest was meant.
    paths = [_path(error, body) for error in errors]
    path = max(paths, key=len)
    first = errors[paths.index(path)]
    kind, found = first["type"], first["input"]
    is_content = path[:1] and path[0] in _CONTENT
    if kind == "literal_error" and is_content and path[-1] == "type":
        return unsupported_content(found, field_name(path[:-1]))
    if kind.startswith("union_tag_"):
        context = first["ctx"]
        field = "role" if context["discriminator"] == "'role'" else "type"
        if kind == "union_tag_invalid" and field == "type" and is_content:
            return unsupported_content(context["tag"], field_name(path))
        where = f"{field_name(path)}.{field}"
        found = found.get(field) if isinstance(found, Mapping) else found
        problem = f"Input should be one of {context.get('expected_tags')}"
        kind = "missing" if found is None else kind
    else:
        where = field_name(path)
        words = dict.fromkeys(_words(error) for error, at in zip(errors, paths, strict=True) if at == path)
        problem = " or ".join(words).replace(" or Input should be", " or")
    if kind == "missing":
        return bad_request(f"{where}: missing", param=where)
    return bad_request(f"{where}: {problem} (got {_shown(found)})", param=where)


def _words(error: ErrorDetails) -> str:
    is_object = error["type"] in ("dict_type", "model_attributes_type")
    return "Input should be an object" if is_object else error["msg"]


def _path(error: ErrorDetails, body: Any) -> list[int | str]:
    """The keys of an error's location; without the names of unions' members, which stand between them."""
    path: list[int | str] = []
    here: Any = body
    location = error["loc"]
    for place, step in enumerate(location):
        if isinstance(step, int) or (isinstance(here, Mapping) and step in here):
            path.append(step)
            here = here[step]
        elif error["type"] == "missing" and place == len(location) - 1:
            path.append(step)
    return path


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, str | int | float)
    text = repr(value) if plain else type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
