"""One spelling per value, and its digest; what the trainer's reader needs of them without any model."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from hpcroll.errors import SchemaVersionError

_VERSION = re.compile(r"^(\d{1,4})\.(\d{1,4})$")


def parse_version(text: str) -> tuple[int, int]:
    """The (major, minor) of a schema version; raises `SchemaVersionError` for anything else."""
    match = _VERSION.match(text) if isinstance(text, str) else None
    if match is None:
        raise SchemaVersionError(f"schema_version {text!r} is not of the form MAJOR.MINOR")
    return int(match[1]), int(match[2])


def require_major(written: str, major: int, what: object) -> None:
    """Raises `SchemaVersionError` unless `what`, which has schema version `written`, is of `major`."""
    if parse_version(written)[0] != major:
        raise SchemaVersionError(
            f"{what} has schema version {written}, this hpcroll reads {major}.x; use the hpcroll that wrote "
            "it, or a newer one"
        )


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data`, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
