"""Physical quantities: a number within a tolerance, and a unit that is converted where it can be."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, field_validator

from hpcroll.config import Strict
from hpcroll.evaluators.answers import AnswerEvaluator, AnswerSpec, Match
from hpcroll.evaluators.units import plain_unit, read_quantity, unit_factor, units_ratio


class QuantitySpec(AnswerSpec):
    """An expected number and its unit."""

    answer: str = Field(min_length=1)
    """The expected number, in the unit below."""
    unit: str = ""
    """Unit: pint's spelling (`m/s^2`) or LaTeX; a leading power of ten (`$10^6$ m`) is part of it."""
    unit_required: bool = False
    """Refuse an answer without a unit."""
    relative_tolerance: float = Field(default=0.01, ge=0, lt=1)
    """Largest relative error that counts as right."""
    absolute_tolerance: float = Field(default=1e-12, ge=0)
    """Largest absolute error that counts as right, in the unit above; for expected values near 0."""

    @field_validator("answer")
    @classmethod
    def _is_a_number(cls, answer: str) -> str:
        found = read_quantity(answer)
        if found is None or found[1]:
            raise ValueError(f"{answer!r} is not a number; the unit goes into `unit`")
        return answer


def same_quantity(spec: QuantitySpec, text: str) -> Match:
    """Whether the last quantity in `text` is the expected one.

    Without a unit the number is read in the task's unit, its power of ten counted once whether the answer
    has it or not. A unit that pint knows is converted; one that it does not know must be the same text.
    """
    found = read_quantity(text)
    expected = read_quantity(spec.answer)
    if found is None or expected is None:
        return False, "no number in the answer"
    value, unit = found
    factor, wanted = unit_factor(spec.unit)
    number = expected[0]
    reading = f"read as {value:g} {unit}".rstrip()

    def close(got: float, want: float, scale: float) -> bool:
        tolerance = spec.absolute_tolerance * scale
        return math.isclose(got, want, rel_tol=spec.relative_tolerance, abs_tol=tolerance)

    if not unit:
        if spec.unit_required and wanted:
            return False, f"{reading}; the unit is missing"
        return close(value, number, 1.0) or close(value, number * factor, factor), reading
    if plain_unit(unit) == plain_unit(wanted):
        return close(value, number * factor, factor), reading
    converted = units_ratio(value, unit, wanted)
    if isinstance(converted, str):
        return False, f"{reading}; {converted}"
    return close(converted, number * factor, factor), reading


class QuantityEvaluator(AnswerEvaluator):
    """Reward 1.0 where the answer is the expected quantity, within the task's tolerance."""

    Spec: ClassVar[type[Strict]] = QuantitySpec
    name: ClassVar[str] = "quantity"
    compare = staticmethod(same_quantity)
    packages: ClassVar[tuple[str, ...]] = ("pint",)
