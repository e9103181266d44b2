"""JSON that every reader takes: ASCII, without NaN and infinities."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON; numbers that JSON cannot say are null."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
