"""A record as JSON; imported when first needed, since the models cost more than the rest of a reader."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from hpcroll.contract.trajectory import TrajectoryRecord

_WITHOUT_TEXT = {"calls": {"__all__": {"messages", "reply"}}}


def record_bytes(record: TrajectoryRecord) -> bytes:
    """The record, its calls without messages and replies."""
    try:
        return record.model_dump_json(exclude=_WITHOUT_TEXT).encode()
    except PydanticSerializationError:  # a lone surrogate, see json_bytes
        return json_bytes(record.model_dump(mode="json", exclude=_WITHOUT_TEXT))


def text_bytes(record: TrajectoryRecord) -> bytes:
    """Messages and reply of each call."""
    return json_bytes([[call.messages, call.reply] for call in record.calls])


def parse_record(raw: bytes | memoryview, text: bytes | memoryview | None) -> TrajectoryRecord:
    """The record of `record_bytes`, and of `text_bytes` where given."""
    fields = parse_json(raw)
    if text is not None:
        for call, (messages, reply) in zip(fields["calls"], parse_json(text), strict=True):
            call["messages"], call["reply"] = messages, reply
    return TrajectoryRecord.model_validate(fields)


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8. An agent's text may hold a lone surrogate, and a commit must not fail on it."""
    try:
        return to_json(value)
    except PydanticSerializationError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def parse_json(raw: bytes | memoryview) -> Any:
    """The inverse of `json_bytes`."""
    return json.loads(str(raw, "utf-8", "surrogatepass"))
