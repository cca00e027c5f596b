"""Answers written as equations or inequalities: named values (`x = 5`), intervals (`1 < x < 2`) and other relations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from dflash_mcmc.grading.math.answers import Answer, Either, Formula, Named, Related, Several, Words, multiplied
from dflash_mcmc.grading.math.syntax import Node, NotParsed, parse
from dflash_mcmc.grading.math.tokens import Token, depths, split
from dflash_mcmc.grading.math.units import PERCENT, MeasureUnit, measured
from dflash_mcmc.grading.math.values import NoValue, close, exact, within

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


RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq", r"\approx", r"\in")
ORDERS = ("<", ">", r"\leq", r"\geq")
_REVERSED = {">": "<", r"\geq": r"\leq"}
_OPERATORS = {"+", "-", "/", r"\cdot", "^", r"\frac", r"\sqrt", "!", ",", r"\pm", r"\binom"}
_NOT_NAMES = {"e", "i", r"\pi", r"\infty", r"\degree"}
_NEGATIONS = {r"\not", r"\neg", r"\lnot", "not"}
_MAX_NAME_TOKENS = 16
_APPROXIMATION = 0.01
_INFINITY = (Token("command", r"\infty"),)


class _Bounds(NamedTuple):
    """An interval for a name, `1 < x < 2`."""

    name: tuple[Token, ...]
    brackets: str
    low: Formula
    high: Formula


def related(tokens: Sequence[Token], read: Callable[[Sequence[Token]], Answer]) -> Answer:
    """Parses tokens with relations outside brackets as an answer. `read` parses one side."""
    sides, between = split(tokens, lambda token: token.value in RELATIONS)
    signs = [token.value for token in between]
    if not all(sides) or any(side[-1].value == "/" for side in sides):  # `x /= 5` and `x =/= 5` mean "not equal"
        return Formula(tuple(tokens), MeasureUnit())
    if r"\approx" in signs:
        return _approximate(sides, read)
    if set(signs) == {"="}:
        return _equation(tokens, sides, read)
    if signs == [r"\in"] and is_name(sides[0]):
        value = read(sides[1])
        return Named(tuple(sides[0]), value._replace(sure=True) if isinstance(value, Several) else value)
    if set(signs) <= {">", r"\geq"}:
        sides, signs = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]]
    if set(signs) <= {"<", r"\leq"}:
        return _inequality(tokens, sides, signs)
    if signs == [r"\neq"]:
        return Related(signs[0], _formula(sides[0]), _formula(sides[1]))
    return Formula(tuple(tokens), MeasureUnit())


def is_name(tokens: Sequence[Token]) -> bool:
    """Whether tokens name a value: letters with indices, `f(x)`, `AB`, words or `(x,y)`; not numbers or operations."""
    if not tokens or len(tokens) > _MAX_NAME_TOKENS:
        return False
    if any(token.value.lower().split()[-1:] in ([word] for word in _NEGATIONS) for token in tokens):
        return False  # `\text{not } x = 5`
    if any(token.value in (r"\frac", "/") for token in tokens):  # a ratio of lengths such as AB/CD is a name too
        tokens = [token for token in tokens if token.value not in (r"\frac", "/", "{", "}")]
        if any(token.kind == "number" for token in tokens):
            return False
    named, indexed = False, False
    for token, depth in zip(tokens, depths(tokens), strict=True):
        if depth == 0 and token.value in _OPERATORS:
            return False
        if token.kind in ("number", "repeating") and depth == 0 and not indexed:
            return False
        indexed = token.value == "_"
        named = named or token.kind in ("letter", "word") or (token.kind == "command" and token.value not in _OPERATORS)
        if len(tokens) == 1 and token.value in _NOT_NAMES:
            return False
    return named


def _is_sum(side: Sequence[Token]) -> bool:
    """Whether a side is a sum that a problem may ask for, e.g. `m + n`. Sums with x, y or z are lines and do not count."""
    letters = all(token.kind == "letter" and token.value not in (*_NOT_NAMES, "x", "y", "z") for token in side[::2])
    return letters and len(side) % 2 == 1 and all(token.value == "+" for token in side[1::2])


def _equation(tokens: Sequence[Token], sides: list[list[Token]], read: Callable[[Sequence[Token]], Answer]) -> Answer:
    if is_name(sides[0]) or (_is_sum(sides[0]) and not _has_variable(sides[-1])):
        return Named(tuple(sides[0]), _result(sides[1:], read))
    if len(sides) == 2 and is_name(sides[1]):
        return Named(tuple(sides[1]), read(sides[0]))
    if not any(_has_variable(side) for side in sides):
        return _result(sides, read)
    if len(sides) > 2:
        return Formula(tuple(tokens), MeasureUnit())
    return Related("=", _formula(sides[0]), _formula(sides[1]))


def _result(sides: list[list[Token]], read: Callable[[Sequence[Token]], Answer]) -> Answer:
    """The answer in a chain such as `3 + 4 = 7`: its last side, if all sides with rational values are equal."""
    known = [quantity for quantity in map(quantity_of, sides) if quantity is not None]
    if not all(same_quantity(*pair) for pair in combinations(known, 2)):
        return Words("an equation that does not hold")
    return read(sides[-1])


def _approximate(sides: list[list[Token]], read: Callable[[Sequence[Token]], Answer]) -> Answer:
    """Parses `exact \\approx approximate`, possibly after a name.

    If the sides differ by at most 1 %, either side is accepted. Otherwise only the exact side is accepted, and only if it
    rounds to the other side.
    """
    name: tuple[Token, ...] = ()
    if is_name(sides[0]):
        name, sides = tuple(sides[0]), sides[1:]
    if len(sides) == 1:
        answer = read(sides[0])
    elif _is_near(sides[0], sides[-1]):
        answer = Either((read(sides[0]), read(sides[-1])))
    elif is_rounded(sides[-1], sides[0]):
        answer = read(sides[0])
    else:
        answer = Words("an approximation that does not hold")
    return Named(name, answer) if name else answer


def _is_near(side: Sequence[Token], other: Sequence[Token]) -> bool:
    try:
        return close(parse(measured(side).tokens), parse(measured(other).tokens), _APPROXIMATION)
    except NotParsed:
        return False


def _inequality(tokens: Sequence[Token], sides: list[list[Token]], signs: list[str]) -> Answer:
    """An interval if a name is bounded by numbers, otherwise the relation itself. All signs are `<` or `\\leq`."""
    low, high = (list(_INFINITY), list(_INFINITY))
    low.insert(0, Token("sign", "-"))
    opened, closed = ["[" if sign == r"\leq" else "(" for sign in signs], ["]" if sign == r"\leq" else ")" for sign in signs]
    if len(sides) == 3 and is_name(sides[1]) and not (_has_variable(sides[0]) or _has_variable(sides[2])):
        return _interval(sides[1], opened[0] + closed[1], sides[0], sides[2])
    if len(sides) == 2 and is_name(sides[0]) and not _has_variable(sides[1]):
        return _interval(sides[0], "(" + closed[0], low, sides[1])
    if len(sides) == 2 and is_name(sides[1]) and not _has_variable(sides[0]):
        return _interval(sides[1], opened[0] + ")", sides[0], high)
    if len(sides) == 2:
        return Related(signs[0], _formula(sides[0]), _formula(sides[1]))
    return Formula(tuple(tokens), MeasureUnit())


def intersection(inequalities: Sequence[Answer]) -> Answer:
    """The meaning of inequalities joined by `and`.

    `x > 1 and x < 2` is one interval. Inequalities for different names are a list. All others are an `intersection`, which
    never equals a list or a union.
    """
    intervals = [found for item in inequalities if (found := _bounds(item)) is not None]
    names = {tuple(token.value for token in interval.name) for interval in intervals}
    if len(intervals) == len(inequalities) == len(names):
        return Several("list", tuple(inequalities))
    if len(intervals) == len(inequalities) == 2:
        lower, upper = sorted(intervals, key=lambda interval: interval.high.tokens != _INFINITY)
        unbounded = lower.high.tokens == _INFINITY and upper.low.tokens[-1:] == _INFINITY
        if unbounded and _is_below(lower.low, upper.high):
            return Named(lower.name, Several(lower.brackets[0] + upper.brackets[1], (lower.low, upper.high), sure=True))
    return Several("intersection", tuple(inequalities))


def _bounds(answer: Answer) -> _Bounds | None:
    """The bounds that an interval for a name gives; None for any other answer."""
    if not isinstance(answer, Named) or not isinstance(answer.value, Several) or len(answer.value.items) != 2:
        return None
    low, high = answer.value.items
    if not isinstance(low, Formula) or not isinstance(high, Formula):
        return None
    return _Bounds(answer.name, answer.value.kind, low, high)


def _is_below(low: Formula, high: Formula) -> bool:
    try:
        ends = [exact(parse(side.tokens)) for side in (low, high)]
    except (NotParsed, NoValue):
        return False
    known = [end for end in ends if end is not None]
    return len(known) < 2 or known[0] < known[1]


def _has_variable(side: Sequence[Token]) -> bool:
    return any(token.kind == "letter" and token.value not in _NOT_NAMES for token in side)


def _interval(name: Sequence[Token], brackets: str, low: Sequence[Token], high: Sequence[Token]) -> Named:
    return Named(tuple(name), Several(brackets, (_formula(low), _formula(high)), sure=True))


def _formula(side: Sequence[Token]) -> Formula:
    found = measured(side)
    return Formula(found.tokens, found.unit, found.multiplier)
