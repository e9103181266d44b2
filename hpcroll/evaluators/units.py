"""Reads numbers and units as people and models write them: plain, LaTeX, with powers of ten."""

from __future__ import annotations

import re
from functools import cache
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pint import UnitRegistry

_PLAIN = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_POWER = r"10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d+)\s*\}|\(\s*([+-]?\d+)\s*\)|([+-]?\d+))"
_TIMES = r"(?:\s*(?:\\times|\\cdot|\*|[xX](?=\s*10))\s*|\s+)"
_TOKEN = re.compile(
    # Exponents of units and digits glued to letters (s-1, x2, H2O) are no values.
    r"(?P<skip>(?:\^|\*\*)\s*\{?\s*[+-]?\d+(?:\.\d+)?|[A-Za-z_]+-?\d+)"
    rf"|(?P<value>(?P<sign>[+-]?)\s*(?:(?P<power>{_POWER})|(?P<plain>{_PLAIN})"
    rf"(?:\s*/\s*(?P<divisor>{_PLAIN}))?(?:{_TIMES}(?P<scale>{_POWER}))?))"
)
_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*({_PLAIN})\s*\}}\s*\{{\s*({_PLAIN})\s*\}}")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_WRAPPED = re.compile(r"\\(?:mathrm|text|textrm|mathit|rm|operatorname)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
# No tower of powers: pint would compute it.
_UNIT = re.compile(
    r"(?:[A-Za-z_]\w*|[/()]|\*(?!\*)|\*\*(?:[+-]?\d{1,2}(?:\.\d+)?|\([+-]?\d{1,2}(?:\.\d+)?\))(?!\*\*)"
    r"|\b1(?=/))+"
)
_NO_SYNTAX = (SyntaxError, TokenError)
_ALIASES = {"KJ": "kJ", "kPA": "kPa", "KPa": "kPa", "Kg": "kg"}


def read_quantity(text: str) -> tuple[float, str] | None:
    """The last value in `text` and the unit behind it, or None where there is no finite number.

    A \\boxed{...} or what follows the last equals sign goes before the rest of the text.
    """
    boxed = _BOXED.findall(text)
    text = _tidy(boxed[-1] if boxed else text)
    text = re.split(r"=|≈|\\approx|\\simeq", text)[-1]
    values = [match for match in _TOKEN.finditer(text) if match["value"] is not None]
    if not values:
        return None
    value = _value(values[-1])
    if value is None:
        return None
    return value, _without_stray_brackets(text[values[-1].end() :])


def unit_factor(unit: str) -> tuple[float, str]:
    """A unit's leading power of ten, and the rest: `$10^6$ m` is (1e6, "m")."""
    text = _tidy(unit)
    match = re.match(_POWER, text)
    if match is None:
        return 1.0, text
    return _power(match.groups()), text[match.end() :].strip(" *")


def plain_unit(unit: str) -> str:
    """The unit's text without spaces and LaTeX, for comparing what no table knows."""
    return re.sub(r"[\s{}()*;.,~]", "", _expression(unit)).casefold()


def units_ratio(value: float, unit: str, wanted: str) -> float | str:
    """`value` converted from `unit` to `wanted`, or why that cannot be.

    The text behind a number may be prose: a first word that is a unit counts, and words that are no unit
    stand for none where none is wanted.
    """
    words = unit.split()
    source = _parsed(unit)
    if source is None and len(words) > 1:
        source = _parsed(words[0])
    target = _parsed(wanted)
    if target is None:
        return f"the unit must be {wanted!r}"
    if source is None:
        return f"{unit!r} is not a unit that can be compared with {wanted!r}" if wanted else value
    try:
        return float(_registry().Quantity(value, source).to(target).magnitude)
    except (ValueError, TypeError) as error:  # DimensionalityError is a TypeError of pint
        return str(error)


def _without_stray_brackets(unit: str) -> str:
    unit = unit.strip(" \t\r\n.,;:!")
    for opening, closing in ("()", "[]", "{}"):
        while unit.endswith(closing) and unit.count(closing) > unit.count(opening):
            unit = unit[:-1].rstrip(" \t.,;:!\\")
    return unit


def _value(match: re.Match[str]) -> float | None:
    groups = match.groupdict()
    sign = -1.0 if groups["sign"] == "-" else 1.0
    try:
        if groups["plain"] is None:
            return sign * _power_of(groups["power"])
        value = float(groups["plain"])
        if groups["divisor"] is not None:
            value /= float(groups["divisor"])
        if groups["scale"] is not None:
            value *= _power_of(groups["scale"])
    except (OverflowError, ZeroDivisionError):
        return None
    return sign * value


def _power_of(text: str) -> float:
    match = re.fullmatch(_POWER, text)
    assert match is not None, text
    return _power(match.groups())


def _power(groups: tuple[str | None, ...]) -> float:
    return 10.0 ** int(next(group for group in groups if group is not None))


def _tidy(text: str) -> str:
    text = text.replace("\u2212", "-").replace("\u00d7", "\\times ").replace("\u00b7", "\\cdot ")
    text = re.sub(r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+)", lambda match: "^{" + match[1].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"\\left|\\right|\\displaystyle|\$", " ", text)
    text = re.sub(r"\\[,;:! ]|~", " ", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d{3})", "", text)
    return _FRACTION.sub(r"\1/\2", text).strip()


def _expression(unit: str) -> str:
    text = _tidy(unit)
    text = re.sub(r"\\hat\s*\{[^{}]*(?:\{[^{}]*\})?[^{}]*\}", "", text)
    text = _WRAPPED.sub(r" \1 ", text)
    text = re.sub(r"\^?\s*\{?\s*\\circ\s*\}?\s*C\b|°\s*C\b", " degC ", text)
    text = re.sub(r"\^?\s*\{?\s*\\circ\s*\}?\s*F\b|°\s*F\b", " degF ", text)
    text = re.sub(r"\^?\s*\{?\s*\\circ\s*\}?|°", " degree ", text)
    text = re.sub(r"(?:\\mu|[\u00b5\u03bc])\s*", "u", text)
    text = re.sub(r"\\?%", " percent ", text)
    text = re.sub(r"\\cdot|\\times|\\dot", "*", text)
    text = re.sub(r"\{\s*\}", "", text)
    text = re.sub(r"\s*\^\s*\{\s*([^{}]*?)\s*\}", r"**(\1)", text)
    text = re.sub(r"\s*\^\s*", "**", text)
    text = re.sub(r"(?<=[A-Za-z])([+-]\d+)", r"**(\1)", text)
    text = text.strip(" \t\r\n;.,")
    text = " ".join(_ALIASES.get(word, word) for word in text.split())
    text = re.sub(r"\s*([*/])\s*", r"\1", text)
    return re.sub(r"(?<=[\w)])\s+(?=[A-Za-z(])", "*", text)


def _parsed(unit: str) -> Any:
    """pint's unit for `unit`, dimensionless for none, None where it knows no such unit."""
    from pint.errors import PintError

    expression = _expression(unit)
    if not expression:
        return _registry().dimensionless
    if not _UNIT.fullmatch(expression):
        return None
    for candidate in (expression, re.sub(r"\b([A-Z])([A-Z])\b", r"\1*\2", expression)):
        try:
            return _registry().parse_units(candidate)
        # pint evaluates what it is given, so that nonsense ends in almost any of these.
        except (PintError, ValueError, TypeError, AttributeError, ArithmeticError, *_NO_SYNTAX):
            continue
    return None


@cache
def _registry() -> UnitRegistry[Any]:
    from pint import UnitRegistry

    return UnitRegistry(autoconvert_offset_to_baseunit=True)
