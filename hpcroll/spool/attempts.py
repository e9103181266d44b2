"""How attempts end without a result, and how many of them a rollout may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import ValidationError

from hpcroll.config import AttemptCaps
from hpcroll.contract import EndReason, Failure, FailureClass, Record
from hpcroll.errors import CorruptRecordError
from hpcroll.fs import publish, read_fresh

_LONGEST_MESSAGE = 8_000
"""Characters of a failure's text that its `.end` keeps."""


class AttemptEnd(Record):
    """The content of an attempt's `.end` file."""

    SCHEMA: ClassVar[str] = "1.0"

    failure: Failure
    ended_by: str
    """The incarnation that wrote it: the attempt's own, or a taker's."""


def write_end(path: Path, failure: Failure, *, ended_by: str) -> bool:
    """Ends an attempt, once and durably; False where somebody ended it before. Raises `OSError`."""
    failure = failure.model_copy(update={"message": failure.message[:_LONGEST_MESSAGE]})
    return publish(path, AttemptEnd(failure=failure, ended_by=ended_by).to_json().encode())


def read_end(path: Path) -> AttemptEnd | None:
    """How an attempt ended without a result; None where it did not. Raises `CorruptRecordError`."""
    data = read_fresh(path)
    if data is None:
        return None
    try:
        return AttemptEnd.from_json(data)
    except ValidationError as error:
        raise CorruptRecordError(f"{path} does not say why an attempt ended: {error}") from error


def poisoned_by(failures: Sequence[Failure], caps: AttemptCaps) -> FailureClass | None:
    """The class whose cap `failures` have reached; None where another attempt may be made.

    Planned stops count towards no cap, takeovers on silence only towards their own.
    """
    counts = Counter(failure.reason for failure in failures)
    limits = (
        (EndReason.TASK, caps.task, FailureClass.TASK),
        (EndReason.INFRA, caps.infra, FailureClass.INFRA),
        (EndReason.POLICY, caps.policy, FailureClass.POLICY),
        (EndReason.KILL, caps.kill, FailureClass.KILL),
        (EndReason.SILENCE, caps.silence, FailureClass.KILL),
    )
    return next((kind for reason, cap, kind in limits if counts[reason] >= cap), None)
