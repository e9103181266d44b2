"""Mathematical answers, compared by math-verify."""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

from hpcroll.config import Strict
from hpcroll.evaluators.answers import AnswerEvaluator, AnswerSpec, Match

_MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{3,}")


class MathSpec(AnswerSpec):
    """A number or a LaTeX expression (with or without $...$)."""


def same_mathematics(spec: MathSpec, text: str) -> Match:
    """Whether `text` ends in an expression that is equal to the expected one.

    Runs in a process that can be killed, so math-verify's own time-outs, which need signals, are off.
    """
    from math_verify import verify

    # Once per process it would warn that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected, found = _parse(spec.answer), _parse(text)
    if not expected:
        return False, f"the expected answer {spec.answer!r} is no mathematics; fix the task"
    if not found:
        return False, "no mathematics in the answer"
    # The order matters: the expected answer comes first.
    right = bool(verify(expected, found, timeout_seconds=None))
    return right, f"read as {found[0]}"


class MathEvaluator(AnswerEvaluator):
    """Reward 1.0 where math-verify finds the answer equal to the expected one."""

    Spec: ClassVar[type[Strict]] = MathSpec
    name: ClassVar[str] = "math_verify"
    compare = staticmethod(same_mathematics)
    packages: ClassVar[tuple[str, ...]] = ("math_verify",)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # Outside $...$ only the last plain number is found: 2 in \frac{1}{2}, 15 in x^2 - 15. Right for a
    # sentence, wrong for a bare formula.
    bare = "\\" in text or not (_WORD.search(text) or "**" in text)
    if bare and text.strip() and not any(mark in text for mark in _MATH_MARKS):
        text = f"${text.strip()}$"
    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed
