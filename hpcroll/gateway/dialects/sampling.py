"""Sampling parameters as agents ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hpcroll.contract import Sampling
from hpcroll.gateway.refusal import bad_request


def read_sampling(fields: Mapping[str, Any]) -> Sampling:
    """`fields`, checked; raises `Refusal` that names the one that is wrong."""
    try:
        return Sampling(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        raise bad_request(f"{name}: {first['msg']} (got {first['input']!r:.80})", param=name) from None
