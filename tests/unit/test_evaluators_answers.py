"""Answers in words: equal mathematics and equal quantities earn the reward, hostile ones cost nothing."""

from __future__ import annotations

import asyncio
import operator
import os
from pathlib import Path

import pytest

from hpcroll.config import EvaluationConfig
from hpcroll.contract import Task, Verdict
from hpcroll.errors import EvaluatorError
from hpcroll.evaluators.answers import AnswerEvaluator, ComparisonProcess
from hpcroll.evaluators.math_answer import MathEvaluator
from hpcroll.evaluators.quantity import QuantityEvaluator, QuantitySpec, same_quantity
from hpcroll.testing.evaluator_suite import Case, EvaluatorContract
from tests.directories import fresh_directories

ACCELERATION = r"$\mathrm{m} / \mathrm{s}^2$"
_MATH, _QUANTITY = MathEvaluator(EvaluationConfig()), QuantityEvaluator(EvaluationConfig())


def verdict(evaluator: AnswerEvaluator, spec: dict[str, object], answer: str | None, root: Path) -> Verdict:
    task = Task.model_validate({"task_id": "t", "handler": "math", "prompt": "p", "spec": spec})
    artefacts = {} if answer is None else {"answer": answer.encode()}
    return asyncio.run(evaluator.evaluate(task, artefacts, fresh_directories(root)))


class TestMathEvaluator(EvaluatorContract):
    def make(self) -> MathEvaluator:
        return _MATH

    def cases(self) -> list[Case]:
        task = Task(task_id="t", handler="math", prompt="p", spec={"answer": r"\frac{3}{4}"})
        return [Case(task, {"answer": b"0.75"}, {"answer": b"0.74"})]


class TestQuantityEvaluator(EvaluatorContract):
    def make(self) -> QuantityEvaluator:
        return _QUANTITY

    def cases(self) -> list[Case]:
        task = Task(task_id="t", handler="stem", prompt="p", spec={"answer": "9.81", "unit": ACCELERATION})
        return [Case(task, {"answer": b"981 cm/s^2"}, {"answer": b"9.81 m/s"})]


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        ("1,200", "The total is $1200$.", 1.0),
        ("18", r"\boxed{18}", 1.0),
        (r"\frac{1}{2}", r"\frac{2}{4}", 1.0),
        (r"\frac{1}{2}", "2", 0.0),
        ("x^2 + 2x - 15", "$(x-3)(x+5)$", 1.0),
        ("x^2 + 2x - 15", "$(x-3)(x-5)$", 0.0),
        ("7", "I cannot say", 0.0),
    ],
)
def test_equal_mathematics_earns_the_reward(
    expected: str, answer: str, reward: float, tmp_path: Path
) -> None:
    assert verdict(_MATH, {"answer": expected}, answer, tmp_path).reward == reward


def test_answer_that_never_ends_is_wrong_and_the_next_one_is_compared(tmp_path: Path) -> None:
    spec: dict[str, object] = {"answer": "3", "compare_timeout_s": 1.0}
    endless = verdict(_MATH, spec, "99999**99999**9999999", tmp_path)
    assert endless.reward == 0.0
    assert "longer than 1 s" in endless.log_tail
    assert verdict(_MATH, {"answer": "3"}, "3", tmp_path).reward == 1.0


def test_comparison_that_raises_or_takes_all_memory_is_no_match() -> None:
    async def run() -> list[bool]:
        process = ComparisonProcess(())
        calls = [(operator.truediv, 1, 0), (bytes, 64 << 30)]
        return [(await process.call(*call, timeout_s=60.0))[0] for call in calls]

    assert asyncio.run(run()) == [False, False]


def test_process_that_dies_twice_is_an_error_and_the_next_comparison_has_a_new_one() -> None:
    async def run() -> object:
        process = ComparisonProcess(())
        with pytest.raises(EvaluatorError, match="died twice"):
            await process.call(os._exit, 1, timeout_s=60.0)
        return await process.call(operator.add, 1, 2, timeout_s=60.0)

    assert asyncio.run(run()) == 3


def test_answer_past_the_limit_is_wrong_without_being_read(tmp_path: Path) -> None:
    found = verdict(_MATH, {"answer": "3", "answer_bytes": 10}, "3" + " " * 10, tmp_path)
    assert found.reward == 0.0
    assert "limit of 10" in found.log_tail


def test_no_answer_is_wrong(tmp_path: Path) -> None:
    assert verdict(_QUANTITY, {"answer": "3"}, None, tmp_path).reward == 0.0


@pytest.mark.parametrize(
    ("expected", "unit", "answer", "right"),
    [
        # A power of ten in the unit counts once, however the answer writes it.
        ("2", "$10^6$ m", "2", True),
        ("2", "$10^6$ m", "2e6", True),
        ("2", "$10^6$ m", r"2 \times 10^{6} \text{ m}", True),
        ("2", "$10^6$ m", "2000 km", True),
        ("2", "$10^6$ m", "2 m", False),
        # Units are converted, and must be of the right kind.
        ("9.81", ACCELERATION, "about 981 cm s^-2", True),
        ("9.81", ACCELERATION, r"\boxed{9.81\ \mathrm{m\,s^{-2}}}", True),
        ("9.81", ACCELERATION, "9.81 m", False),
        ("22", r"$^{\circ} \mathrm{C}$ ", "295.15 K", True),
        ("87.8", r"$\mathrm{JK}^{-1} \mathrm{~mol}^{-1}$", "87.8 J/(K mol)", True),
        ("3.5", r"$\mu C$", "3.5e-6 C", True),
        # A unit that no table knows must be the same text.
        ("6.2", r"$10^{10} \text { electrons; }$", "6.2e10 electrons", True),
        ("6.2", r"$10^{10} \text { electrons; }$", "6.2e10 m", False),
        # Without a unit.
        ("7", " ", "7 nodes", True),
        ("7", " ", "7 m", False),
        ("0.3333", "", "1/3", True),
        ("-30", "", "x = \u221230", True),
        ("5300", "", "5,300", True),
        ("5300", "", "5,399", False),
        ("0", "", "0.0", True),
        ("0", "", "0.001", False),
        # What is no quantity.
        ("1", "m", "", False),
        ("1", "m", "1 m**9**9**9**9", False),
        ("1", "m", "10**9**9**9", False),
        ("1", "m", "1/0 m", False),
        ("1", "m", "1e999 m", False),
    ],
)
def test_quantity_is_read_as_people_write_it(expected: str, unit: str, answer: str, right: bool) -> None:
    spec = QuantitySpec(answer=expected, unit=unit)
    assert same_quantity(spec, answer)[0] is right, same_quantity(spec, answer)[1]


def test_missing_unit_is_refused_where_it_is_required() -> None:
    spec = QuantitySpec(answer="4", unit="m", unit_required=True)
    assert not same_quantity(spec, "4")[0]
    assert same_quantity(spec, "400 cm")[0]


def test_tolerance_is_relative() -> None:
    spec = QuantitySpec(answer="200", unit="m", relative_tolerance=0.05)
    assert same_quantity(spec, "209 m")[0]
    assert not same_quantity(spec, "211 m")[0]


def test_expected_answer_with_a_unit_in_it_is_refused() -> None:
    with pytest.raises(ValueError, match="goes into `unit`"):
        QuantitySpec(answer="4 m")
