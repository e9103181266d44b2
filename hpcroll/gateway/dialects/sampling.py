"""Sampling parameters as agents ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hpcroll.contract import Sampling
from hpcroll.gateway.refusal import bad_request


def read_sampling(body: Mapping[str, Any], names: Mapping[str, str], *, within: str = "") -> Sampling:
    """The parameters in `body`, by our name of each of the API's; of two with one name, the later.

    Raises `Refusal` that names the one that is wrong; `within` is the path of `body`.
    """
    asked = {name: body[name] for name in names if body.get(name) is not None}
    try:
        return Sampling(**{names[name]: value for name, value in asked.items()})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = within + next(theirs for theirs in asked if names[theirs] == first["loc"][0])
        raise bad_request(f"{name}: {first['msg']} (got {first['input']!r:.80})", param=name) from None
