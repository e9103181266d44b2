"""Tasks from the rows of well-known data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpcroll.contract import Task
from hpcroll.errors import ConfigError

Row = Mapping[str, Any]


class RowFormat(StrEnum):
    """The row formats that tasks can be made from."""

    GSM8K = "gsm8k"
    """`question`, and `answer` with the final number behind `####`."""
    HUMANEVAL = "humaneval"
    """`task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`."""
    SCIBENCH = "scibench"
    """`problem_text`, `answer_number`, `unit`; optionally `source` and `problemid`."""


def from_gsm8k(row: Row, *, task_id: str) -> Task:
    """A `math` task of one GSM8K row; raises `ConfigError` where the final number is missing."""
    _, mark, answer = _text(row, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise ConfigError("field answer has no final number behind ####")
    return Task(
        task_id=task_id,
        handler="math",
        dataset=RowFormat.GSM8K,
        prompt=f"{_text(row, 'question').strip()}\n\nSubmit the final number.",
        spec={"answer": answer.strip()},
    )


def from_humaneval(row: Row, *, task_id: str) -> Task:
    """A `code` task of one HumanEval row."""
    prompt = _text(row, "prompt")
    return Task(
        task_id=task_id,
        handler="code",
        dataset=RowFormat.HUMANEVAL,
        prompt=(
            f"Complete the Python function `{_text(row, 'entry_point')}`:\n\n```python\n{prompt.rstrip()}\n"
            "```\n\nLeave the whole program in the file solution.py of the work directory."
        ),
        spec={
            "prefix": prompt,
            "tests": _text(row, "test"),
            "entry_point": _text(row, "entry_point"),
            "solution": _text(row, "canonical_solution"),
        },
        metadata={"row": str(row.get("task_id", ""))},
    )


def from_scibench(row: Row, *, task_id: str) -> Task:
    """A `stem` task of one SciBench row, with that benchmark's tolerance of 5 %."""
    unit = str(row.get("unit", "")).strip()
    ask = f"Submit the answer in units of {unit}." if unit else "Submit the number; it has no unit."
    return Task(
        task_id=task_id,
        handler="stem",
        dataset=RowFormat.SCIBENCH,
        prompt=f"{_text(row, 'problem_text').strip()}\n\n{ask}",
        spec={"answer": _text(row, "answer_number").strip(), "unit": unit, "relative_tolerance": 0.05},
        metadata={"row": f"{row.get('source', '')} {row.get('problemid', '')}".strip()},
    )


_BUILDERS: dict[RowFormat, Callable[..., Task]] = {
    RowFormat.GSM8K: from_gsm8k,
    RowFormat.HUMANEVAL: from_humaneval,
    RowFormat.SCIBENCH: from_scibench,
}


def from_jsonl(path: Path, row_format: RowFormat) -> list[Task]:
    """Tasks of the rows in a JSONL file, named `<format>-<line number>`.

    Raises `ConfigError` that names the file and line of a row that is not of the format.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return list(_built(path, lines, row_format))


def _built(path: Path, lines: list[str], row_format: RowFormat) -> Iterable[Task]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ConfigError("not an object")
            yield _BUILDERS[row_format](row, task_id=f"{row_format}-{number}")
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path} line {number} is no {row_format} row: {error}") from error


def _text(row: Row, field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise ConfigError(f"field {field} is missing or no text")
    return value
