"""Science: a number within a tolerance, and its unit."""

from __future__ import annotations

from typing import ClassVar

from hpcroll.config import Strict
from hpcroll.evaluators.base import Evaluator
from hpcroll.evaluators.quantity import QuantityEvaluator, QuantitySpec
from hpcroll.handlers.base import AnswerHandler


class StemHandler(AnswerHandler):
    """A problem whose answer is a physical quantity; the sandbox is there for calculations."""

    Spec: ClassVar[type[Strict]] = QuantitySpec
    evaluator: ClassVar[type[Evaluator]] = QuantityEvaluator
