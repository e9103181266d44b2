"""Programs: only tests that ran to their end earn the reward."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hpcroll.config import EvaluationConfig
from hpcroll.contract import Task, Verdict
from hpcroll.evaluators.program import ProgramEvaluator, assemble
from hpcroll.testing.evaluator_suite import Case, EvaluatorContract
from tests.directories import fresh_directories

SPEC = {
    "entry_point": "double",
    "prefix": 'def double(x):\n    """Twice x."""\n',
    "tests": "def check(candidate):\n    assert candidate(4) == 8\n    assert candidate(-1) == -2\n",
}
RIGHT = "def double(x):\n    return x + x\n"


def verdict(artefacts: dict[str, str], root: Path, **spec: object) -> Verdict:
    task = Task.model_validate({"task_id": "t", "handler": "code", "prompt": "p", "spec": {**SPEC, **spec}})
    encoded = {name: text.encode() for name, text in artefacts.items()}
    evaluator = ProgramEvaluator(EvaluationConfig())
    return asyncio.run(evaluator.evaluate(task, encoded, fresh_directories(root)))


class TestProgramEvaluator(EvaluatorContract):
    def make(self) -> ProgramEvaluator:
        return ProgramEvaluator(EvaluationConfig())

    def cases(self) -> list[Case]:
        task = Task.model_validate({"task_id": "t", "handler": "code", "prompt": "p", "spec": SPEC})
        wrong = b"def double(x):\n    return 8\n"
        return [Case(task, {"solution": RIGHT.encode()}, {"solution": wrong})]


@pytest.mark.parametrize(
    "artefacts",
    [
        {"answer": "    return 2 * x\n"},
        {"answer": f"Here it is:\n```python\n{RIGHT}```\nDone."},
        {"answer": f"from __future__ import annotations\n{RIGHT}"},
        {"solution": RIGHT, "answer": "The program is in solution.py."},
    ],
    ids=["rest of the function", "fenced", "future import", "file before answer"],
)
def test_program_is_found_where_the_agent_left_it(artefacts: dict[str, str], tmp_path: Path) -> None:
    found = verdict(artefacts, tmp_path)
    assert found.reward == 1.0, found.log_tail


@pytest.mark.parametrize(
    "program",
    [
        "import os\nprint('all tests passed')\nos._exit(0)\n",
        "import sys\nsys.exit(0)\n",
        "raise SystemExit\n",
        "def double(x):\n    raise SystemExit(0)\n",
        "def double(x):\n    return 2 * x\n\nimport os\nos.kill(os.getpid(), 9)\n",
    ],
)
def test_leaving_early_does_not_pass(program: str, tmp_path: Path) -> None:
    assert verdict({"solution": program}, tmp_path).reward == 0.0


def test_endless_program_earns_nothing(tmp_path: Path) -> None:
    found = verdict({"solution": "while True:\n    pass\n"}, tmp_path, timeout_s=1.0)
    assert found.reward == 0.0
    assert "timed out" in found.log_tail


def test_program_past_the_limit_is_not_run(tmp_path: Path) -> None:
    found = verdict({"solution": RIGHT + "#" * 100}, tmp_path, program_bytes=50)
    assert found.reward == 0.0
    assert "limit of 50" in found.log_tail


def test_asserts_alone_are_tests_too(tmp_path: Path) -> None:
    spec = {"entry_point": None, "prefix": "", "tests": "assert double(3) == 6\n"}
    assert verdict({"solution": RIGHT}, tmp_path, **spec).reward == 1.0
    assert verdict({"solution": "def double(x):\n    return x\n"}, tmp_path, **spec).reward == 0.0


def test_indented_code_continues_the_prefix() -> None:
    assert assemble("def f():\n", "    return 1\n") == "def f():\n    return 1\n"
    assert assemble("import math\n", "x = 1\n") == "import math\n\n\nx = 1\n"
