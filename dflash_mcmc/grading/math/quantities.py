r"""Values with units, for checking equations such as `\frac14 = 25\%` and `2 \text{ hours} = 120 \text{ minutes}`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from dflash_mcmc.grading.math.formulas import Node, NotParsed
from dflash_mcmc.grading.math.syntax import parse
from dflash_mcmc.grading.math.tokens import Token
from dflash_mcmc.grading.math.units import PERCENT, MeasureUnit, measured
from dflash_mcmc.grading.math.values import NoValue, exact, within
from dflash_mcmc.grading.math.views import multiplied

_SIZES = (
    {"mm": 1, "cm": 10, "m": 10**3, "km": 10**6}, {"in": 1, "ft": 12, "yd": 36, "mi": 63_360},
    {"mg": 1, "g": 10**3, "kg": 10**6}, {"oz": 1, "lb": 16}, {"month": 1, "year": 12},
    {"s": 1, "min": 60, "h": 3_600, "day": 86_400, "week": 604_800}, {"ml": 1, "l": 10**3},
    {"cup": 1, "pint": 2, "quart": 4, "gal": 16}, {"cent": 1, "dollar": 100},
)
"""Convertible units. Each dictionary has one kind of units, with their sizes as multiples of the smallest unit."""
_DECIMAL = re.compile(r"-?\d*\.(\d+)")


class Quantity(NamedTuple):
    """A rational value and its unit."""

    value: Fraction
    unit: MeasureUnit


def quantity_of(tokens: Sequence[Token]) -> Quantity | None:
    """The quantity that tokens express; None if they are not a formula with a rational value."""
    found = measured(tokens)
    try:
        value = exact(multiplied(parse(found.tokens), found.multiplier))
    except (NotParsed, NoValue):
        return None
    return None if value is None else Quantity(value, found.unit)


def same_quantity(a: Quantity, b: Quantity) -> bool:
    """Whether two quantities are equal. If their units cannot be converted into each other, only the numbers are compared."""
    for sizes in _SIZES:
        if a.unit.name in sizes and b.unit.name in sizes and a.unit.exponent == b.unit.exponent:
            return a.value * sizes[a.unit.name] ** a.unit.exponent == b.value * sizes[b.unit.name] ** b.unit.exponent
    return a.value == b.value or _as_fraction(a) == _as_fraction(b)


def is_rounded(tokens: Sequence[Token], other: Sequence[Token]) -> bool:
    """Whether `tokens` are a decimal or percentage that the value of `other` rounds to."""
    found, exactly = measured(tokens), measured(other)
    decimal = _DECIMAL.fullmatch("".join(token.value for token in found.tokens))
    if decimal is None or found.multiplier != 1 or not found.unit.fits(exactly.unit):
        return False
    scale = 100 if found.unit.name == PERCENT != exactly.unit.name else 1
    try:
        value = multiplied(parse(exactly.tokens), exactly.multiplier)
    except NotParsed:
        return False
    rounded, half = Fraction(decimal.group()) / scale, Fraction(1, 2 * 10 ** len(decimal.group(1))) / scale
    return within(value, Node("number", value=rounded), half)


def _as_fraction(quantity: Quantity) -> Fraction:
    return quantity.value / 100 if quantity.unit.name == PERCENT else quantity.value
