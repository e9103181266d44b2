"""Mathematics: an answer that math-verify compares with the expected one."""

from __future__ import annotations

from typing import ClassVar

from hpcroll.config import Strict
from hpcroll.evaluators.base import Evaluator
from hpcroll.evaluators.math_answer import MathEvaluator, MathSpec
from hpcroll.handlers.base import AnswerHandler


class MathHandler(AnswerHandler):
    """A problem with one right answer; the sandbox is there for calculations."""

    Spec: ClassVar[type[Strict]] = MathSpec
    evaluator: ClassVar[type[Evaluator]] = MathEvaluator
