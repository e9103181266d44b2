"""Versioned records: what may be read by whom.

Every record that outlives a process carries `schema_version` as "MAJOR.MINOR". A reader refuses a newer
major version by name; within its major version it ignores fields that a newer minor version added, and
refuses unknown fields otherwise, because there they are typing errors of a person.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hpcroll.contract.canonical import canonical_json, parse_version, require_major, sha256_hex


class Frozen(BaseModel):
    """An immutable part of a record. Unknown fields are ignored: a newer minor version added them."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Record(Frozen):
    """An immutable, versioned record.

    Subclasses set `SCHEMA` (the version they write). Reading one whose major version is newer raises
    `SchemaVersionError`; fields that a newer minor version added are dropped.
    """

    SCHEMA: ClassVar[str] = "1.0"

    schema_version: str = Field(default="", validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _negotiate(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        written = data.get("schema_version") or cls.SCHEMA
        theirs, ours = parse_version(written), parse_version(cls.SCHEMA)
        require_major(written, ours[0], cls.__name__)
        unknown = sorted(set(data) - set(cls.model_fields))
        if unknown and theirs <= ours:
            raise ValueError(f"unknown fields {', '.join(unknown)} in a {cls.__name__}")
        return {**data, "schema_version": written}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII only; equal records give equal text."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record of `text`; raises `SchemaVersionError` or pydantic's `ValidationError`."""
        return cls.model_validate_json(text)

    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON."""
        return sha256_hex(self.to_json().encode())
