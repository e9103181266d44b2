"""Rows of data sets become tasks whose reference answers are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcroll.errors import ConfigError
from hpcroll.tasks import RowFormat, from_jsonl

DATA = Path(__file__).parents[1] / "data"


def test_final_number_behind_the_mark_is_the_answer() -> None:
    tasks = from_jsonl(DATA / "sums.jsonl", RowFormat.GSM8K)
    assert [task.task_id for task in tasks] == ["gsm8k-1", "gsm8k-2"]
    assert [task.spec["answer"] for task in tasks] == ["312", "1,000"]
    assert {task.handler for task in tasks} == {"math"}


def test_functions_keep_their_tests_and_solutions_out_of_the_prompt() -> None:
    for task in from_jsonl(DATA / "functions.jsonl", RowFormat.HUMANEVAL):
        assert task.handler == "code"
        assert str(task.spec["prefix"]).rstrip() in task.prompt
        for hidden in ("solution", "tests"):
            assert str(task.spec[hidden]).strip() not in task.prompt


def test_quantities_ask_for_their_unit() -> None:
    tasks = from_jsonl(DATA / "quantities.jsonl", RowFormat.SCIBENCH)
    assert "in units of $10^7$ s" in tasks[1].prompt
    assert "it has no unit" in tasks[2].prompt
    assert tasks[0].spec["relative_tolerance"] == 0.05


@pytest.mark.parametrize(
    ("row_format", "row", "reason"),
    [
        (RowFormat.GSM8K, {"question": "q", "answer": "no mark"}, "no final number"),
        (RowFormat.GSM8K, {"answer": "#### 1"}, "question"),
        (RowFormat.HUMANEVAL, {"prompt": "p"}, "entry_point"),
        (RowFormat.SCIBENCH, {"problem_text": "p", "answer_number": 4}, "answer_number"),
    ],
)
def test_row_of_another_shape_is_refused_by_line_and_field(
    row_format: RowFormat, row: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=reason) as caught:
        from_jsonl(path, row_format)
    assert f"{path} line 2" in str(caught.value)
