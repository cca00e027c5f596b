r"""Parses a string as one of the kinds of answers: words, a number in a base, a list, a tuple or interval, a matrix, etc.

The second part parses equations and inequalities: named values (`x = 5`), intervals (`1 < x < 2`) and other relations. Values
with units check equations such as `\frac14 = 25\%` and `2 \text{ hours} = 120 \text{ minutes}`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from dflash_mcmc.grading.math import answers
from dflash_mcmc.grading.math.syntax import Node, NotParsed, parse
from dflash_mcmc.grading.math.tokens import FACING, Token, depths, enclosed, facing, prefixed, split, tokenise
from dflash_mcmc.grading.math.values import NoValue, close, exact, within
from dflash_mcmc.grading.math.words import NUMBERS, SEPARATORS

_LETTER = re.compile(r"\(?\s*([A-Ja-j])\s*\)?[.:]?")
_LABELLED = re.compile(r"\(([A-J])\)\s*([^A-Za-z]*\d[^A-Za-z]*)")
_OPTION = re.compile(r"(?i:option|choice) ?\(? ?([A-J]) ?\)?")
_BASE = r"\(?(?:in )?base ?"
_DIGITS = r"(-? ?)(\( ?)?(\d[\dA-F ]*?)(?(2) ?\))"
_BASED = re.compile(rf"{_DIGITS} ?(?:_ ?(?:{_BASE})?|{_BASE})(\d{{1,2}}|{'|'.join(NUMBERS)})\)?", re.IGNORECASE)
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
_PUNCTUATION = set(".,:;!?'\"()-&#")
_STOPS = (".", ",", ";", ":", r"\\")
_MAX_SIGNS = 2
"""The largest number of independent plus-or-minus signs in one answer. Each sign doubles the number of answers."""


def readings(text: str) -> list[answers.Answer]:
    """The possible meanings of a string. There are two if the string has a comma that may group digits, as in `1,234`."""
    tokens, ungrouped = (facing(prefixed(tokenise(text, grouping))) for grouping in (True, False))
    if tokens == ungrouped:
        return [read(tokens)]
    answer = read(ungrouped)
    if isinstance(answer, answers.Several) and answer.kind == "list":
        answer = answer._replace(kind="ordered")
    return [read(tokens), answer]


def read(tokens: Sequence[Token]) -> answers.Answer:
    """Parses tokens, which may be a list, as an answer."""
    tokens = _unwrapped(tokens)
    if len(tokens) > 1 and all(token.kind == "word" for token in tokens):
        return answers.Words(" ".join(token.value for token in tokens))
    parts, separators = split(tokens, _is_separator)
    if {token.value.lower() for token in separators} == {"and"} and all(_is_inequality(part) for part in parts):
        return intersection([read_one(part) for part in parts])
    parts = [part for part in parts if part]
    items = [item for part in parts for item in _expand_signs(part)]
    if len(items) > 1:
        joining = {token.value.lower() for token in separators if token.kind == "word"}
        return _list([read_one(item) for item in items], joining, signed=len(items) > len(parts))
    return read_one(items[0]) if items else answers.Words("")


def _list(items: Sequence[answers.Answer], joining: set[str], signed: bool) -> answers.Several:
    """A list of items. `signed` means that the list contains both signs of a plus-or-minus.

    A signed list is surely a list of solutions, not a point. A list with named items or joining words is also surely a list of
    solutions, unless each item has a different name and no word is `or`.
    """
    each, some = answers.names(items), any(isinstance(item, answers.Named) for item in items)
    point = len(each or ()) == len(items) and "or" not in joining
    return answers.Several("list", tuple(items), sure=signed or (not point and (some or bool(joining))))


def read_one(tokens: Sequence[Token]) -> answers.Answer:
    """Parses tokens without commas outside brackets as an answer."""
    tokens = _unwrapped(tokens)
    for kind in (_choice, _words, _matrix):
        answer = kind(tokens)
        if answer is not None:
            return answer
    if any(depth == 0 and token.value in RELATIONS for token, depth in zip(tokens, depths(tokens), strict=True)):
        return related(tokens)
    parts, unions = split(tokens, lambda token: token.value == r"\cup")
    if unions:
        return answers.Several("union", tuple(read_one(part) for part in parts))
    pair = enclosed(tokens)
    if pair is not None:
        return _bracketed(*pair, tokens)
    if [token.value for token in tokens] == [r"\emptyset"]:
        return answers.Several("set", ())
    return _based(tokens) or _formula(tokens)


def _formula(tokens: Sequence[Token]) -> answers.Formula:
    formula = answers.measured(tokens)
    if len(formula.tokens) == 1 and (word := formula.tokens[0].value.lower()) in NUMBERS:
        return formula._replace(tokens=(Token("number", str(NUMBERS[word])),))
    return formula


def _is_inequality(tokens: Sequence[Token]) -> bool:
    """Whether the tokens are an inequality."""
    return any(depth == 0 and token.value in ORDERS for token, depth in zip(tokens, depths(tokens), strict=True))


def _is_separator(token: Token) -> bool:
    return token.value in (",", ";") or (token.kind == "word" and token.value.strip(" ,").lower() in SEPARATORS)


def _unwrapped(tokens: Sequence[Token]) -> list[Token]:
    """Removes braces around all tokens, a leading `=`, `:` or `\\approx`, and trailing punctuation."""
    tokens = list(tokens)
    while True:
        pair = enclosed(tokens)
        if pair is not None and pair[0] == "{}":
            tokens = pair[1]
        elif tokens and tokens[0].value in ("=", r"\approx", ":"):
            tokens = tokens[1:]
        elif tokens and tokens[-1].value in _STOPS:
            tokens = tokens[:-1]
        else:
            return tokens


def _expand_signs(tokens: list[Token]) -> Iterable[list[Token]]:
    r"""Expands plus-or-minus into several answers: `\pm` takes both signs, and `\mp` the opposite sign.

    Three kinds of tokens are not expanded: sets, because `_bracketed` expands their items; more than `_MAX_SIGNS` signs; and
    several `\pm` together with a `\mp`.
    """
    pair = enclosed(_unwrapped(tokens))
    if not any(token.value == r"\pm" for token in tokens):
        tokens = [token._replace(value=r"\pm") if token.value == r"\mp" else token for token in tokens]
    positions = [position for position, token in enumerate(tokens) if token.value == r"\pm"]
    if not 0 < len(positions) <= _MAX_SIGNS or (pair is not None and pair[0] == r"\{\}"):
        return [tokens]
    if len(positions) > 1 and any(token.value == r"\mp" for token in tokens):
        return [tokens]
    choices = itertools.product("+-", repeat=len(positions))
    return [_with_signs(tokens, dict(zip(positions, signs, strict=True))) for signs in choices]


def _with_signs(tokens: list[Token], signs: dict[int, str]) -> list[Token]:
    opposite = "-" if "+" in signs.values() else "+"
    return [Token("sign", signs[index]) if index in signs else Token("sign", opposite) if token.value == r"\mp" else token
            for index, token in enumerate(tokens)]


def _words(tokens: Sequence[Token]) -> answers.Words | None:
    if not tokens:
        return answers.Words("")
    first = tokens[0]
    if first.kind != "word" or first.value.lower() in NUMBERS:
        return None
    if all(token.kind in ("word", "number") or token.value in _PUNCTUATION for token in tokens):
        return answers.Words(" ".join(token.value for token in tokens))
    return None


def _choice(tokens: Sequence[Token]) -> answers.ChoiceAnswer | None:
    """Parses a choice such as `(C)`, `(C) 12` or `option C`; None for other tokens."""
    values = [token.value for token in tokens]
    if not tokens:
        return None
    if option := _OPTION.fullmatch(" ".join(values)):
        return answers.ChoiceAnswer(option.group(1), None)
    if len(tokens) == 1 and tokens[0].kind == "word" and (labelled := _LABELLED.fullmatch(values[0])):
        return answers.ChoiceAnswer(labelled.group(1), read(tokenise(labelled.group(2))))
    if tokens[0].kind == "word" and (match := _LETTER.fullmatch(values[0])) and len(tokens) > 1 and not values[0].isalpha():
        return answers.ChoiceAnswer(match.group(1).upper(), read(tokens[1:]))
    if values[0] == "(" and values[2:3] == [")"] and tokens[1].kind == "letter" and _LETTER.fullmatch(values[1]):
        rest = tokens[3:]
        if not rest:
            return answers.ChoiceAnswer(values[1].upper(), None)
        if (rest[0].spaced and rest[0].kind in ("number", "word")) or rest[0].value in (r"\frac", r"\sqrt"):
            return answers.ChoiceAnswer(values[1].upper(), read(rest))
    return None


def _based(tokens: Sequence[Token]) -> answers.Based | answers.Formula | None:
    """Parses `52_8`, `52_{8}`, `(52)_8`, `52_{\\text{eight}}` and `52 \\text{ base } 8`; `52_{10}` is 52."""
    text = " ".join(token.value for token in tokens if token.value not in ("{", "}"))
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    sign, _, digits, base = match.groups()
    digits, base = digits.replace(" ", "").upper().lstrip("0") or "0", int(NUMBERS.get(base.lower(), base))
    if any(int(digit, 16) >= base for digit in digits):
        return None
    if base == 10:
        return _formula([*([Token("sign", "-")] if sign.strip() else []), Token("number", digits)])
    return answers.Based(f"{sign.strip()}{digits}", base)


def _matrix(tokens: Sequence[Token]) -> answers.Matrix | None:
    begins = [index for index, token in enumerate(tokens) if token.kind == "begin"]
    if len(begins) != 1 or tokens[begins[0]].value not in _MATRICES:
        return None
    ends = [index for index, token in enumerate(tokens) if token.kind == "end"]
    if len(ends) != 1:
        return None
    before, after = list(tokens[:begins[0]]), list(tokens[ends[0] + 1:])
    if before and after and (before[-1].value, after[0].value) in (("(", ")"), ("[", "]")):
        before, after = before[:-1], after[1:]
    factor = before[:-1] if len(before) > 1 and before[-1].value == r"\cdot" else before
    if after or any(token.value in RELATIONS for token in before) or not _is_factor(factor):
        return None
    rows, _ = split(tokens[begins[0] + 1:ends[0]], lambda token: token.value == r"\\")
    cells = [split(row, lambda token: token.value == "&")[0] for row in rows if row]
    return answers.Matrix(tuple(tuple(read(cell) for cell in row) for row in cells), tuple(factor))


def _is_factor(tokens: Sequence[Token]) -> bool:
    r"""Whether the tokens before a matrix are a factor of it: nothing, a sign or one term, but not `1+2`, `\sqrt` or `2^`."""
    if not tokens or answers.token_values(tokens) in (("-",), ("+",)):
        return True
    if any(depth == 0 and token.value in ("+", "-") for token, depth in list(zip(tokens, depths(tokens), strict=True))[1:]):
        return False
    try:
        parse(tuple(tokens))
    except NotParsed:
        return False
    return True


def _is_set_variable(tokens: Sequence[Token]) -> bool:
    r"""Whether tokens can be the left part of a set `{x | ...}`: a name, or `x \in \mathbb{R}`."""
    return is_name(tokens[:1]) and answers.token_values(tokens[1:]) in ((), (r"\in", r"\mathbb", "R"))


def _bracketed(kind: str, content: list[Token], tokens: Sequence[Token]) -> answers.Answer:
    parts = split(content, _is_separator)[0]
    items = [item for part in parts for item in (_expand_signs(part) if kind == r"\{\}" else [part])]
    if kind == r"\{\}":
        builder, bars = split(content, lambda token: token.value in ("|", ":"))
        if len(bars) == 1 and len(items) == 1 and _is_set_variable(builder[0]):
            return read(builder[1])
        return answers.Several("set", tuple(read(item) for item in items if item))
    if len(items) == 1 and kind in ("()", "[]"):
        inner = read(content)
        return inner if kind == "()" or not isinstance(inner, answers.Formula) else _formula(tokens)
    return answers.Several(kind, tuple(read(item) for item in items), sure=tokens[0].kind == FACING)


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
    unit: answers.MeasureUnit


def quantity_of(tokens: Sequence[Token]) -> Quantity | None:
    """The quantity that tokens express; None if they are not a formula with a rational value."""
    formula = answers.measured(tokens)
    try:
        value = exact(answers.multiplied(parse(formula.tokens), formula.multiplier))
    except (NotParsed, NoValue):
        return None
    return None if value is None else Quantity(value, formula.unit)


def same_quantity(a: Quantity, b: Quantity) -> bool:
    """Whether two quantities are equal. If their units cannot be converted into each other, only the numbers are compared."""
    for sizes in _SIZES:
        if a.unit.name in sizes and b.unit.name in sizes and a.unit.exponent == b.unit.exponent:
            return a.value * sizes[a.unit.name] ** a.unit.exponent == b.value * sizes[b.unit.name] ** b.unit.exponent
    return a.value == b.value or _as_fraction(a) == _as_fraction(b)


def is_rounded(tokens: Sequence[Token], other: Sequence[Token]) -> bool:
    """Whether `tokens` are a decimal or percentage that the value of `other` rounds to."""
    formula, exactly = answers.measured(tokens), answers.measured(other)
    decimal = _DECIMAL.fullmatch("".join(token.value for token in formula.tokens))
    if decimal is None or formula.multiplier != 1 or not formula.unit.fits(exactly.unit):
        return False
    scale = 100 if formula.unit.name == answers.PERCENT != exactly.unit.name else 1
    try:
        value = answers.multiplied(parse(exactly.tokens), exactly.multiplier)
    except NotParsed:
        return False
    rounded, half = Fraction(decimal.group()) / scale, Fraction(1, 2 * 10 ** len(decimal.group(1))) / scale
    return within(value, Node("number", value=rounded), half)


def _as_fraction(quantity: Quantity) -> Fraction:
    return quantity.value / 100 if quantity.unit.name == answers.PERCENT else quantity.value


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
    low: answers.Formula
    high: answers.Formula


def related(tokens: Sequence[Token]) -> answers.Answer:
    """Parses tokens with relations outside brackets as an answer."""
    sides, between = split(tokens, lambda token: token.value in RELATIONS)
    signs = [token.value for token in between]
    if not all(sides) or any(side[-1].value == "/" for side in sides):  # `x /= 5` and `x =/= 5` mean "not equal"
        return answers.Formula(tuple(tokens), answers.MeasureUnit())
    if r"\approx" in signs:
        return _approximate(sides)
    if set(signs) == {"="}:
        return _equation(tokens, sides)
    if signs == [r"\in"] and is_name(sides[0]):
        value = read(sides[1])
        return answers.Named(tuple(sides[0]), value._replace(sure=True) if isinstance(value, answers.Several) else value)
    if set(signs) <= {">", r"\geq"}:
        sides, signs = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]]
    if set(signs) <= {"<", r"\leq"}:
        return _inequality(tokens, sides, signs)
    if signs == [r"\neq"]:
        return answers.Related(signs[0], answers.measured(sides[0]), answers.measured(sides[1]))
    return answers.Formula(tuple(tokens), answers.MeasureUnit())


def is_name(tokens: Sequence[Token]) -> bool:
    """Whether tokens name a value: letters with indices, `f(x)`, `AB`, words or `(x,y)`; not numbers or operations."""
    if not tokens or len(tokens) > _MAX_NAME_TOKENS:
        return False
    if any(token.value.lower().split()[-1:] in ([word] for word in _NEGATIONS) for token in tokens):
        return False  # `\text{not } x = 5`
    if [token.value for token in tokens[1:6]] == ["^", "{", "-", "1", "}"] and tokens[6:7] and tokens[6].value == "(":
        tokens = [tokens[0], *tokens[6:]]  # the inverse of a function, `f^{-1}(x)`
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


def _equation(tokens: Sequence[Token], sides: list[list[Token]]) -> answers.Answer:
    if is_name(sides[0]) or (_is_sum(sides[0]) and not _has_variable(sides[-1])):
        return answers.Named(tuple(sides[0]), _result(sides[1:]))
    if len(sides) == 2 and is_name(sides[1]):
        return answers.Named(tuple(sides[1]), read(sides[0]))
    if not any(_has_variable(side) for side in sides):
        return _result(sides)
    if len(sides) > 2:
        return answers.Formula(tuple(tokens), answers.MeasureUnit())
    return answers.Related("=", answers.measured(sides[0]), answers.measured(sides[1]))


def _result(sides: list[list[Token]]) -> answers.Answer:
    """The answer in a chain such as `3 + 4 = 7`: its last side, if all sides with rational values are equal."""
    quantities = [quantity for quantity in map(quantity_of, sides) if quantity is not None]
    if not all(same_quantity(*pair) for pair in itertools.combinations(quantities, 2)):
        return answers.Words("an equation that does not hold")
    return read(sides[-1])


def _approximate(sides: list[list[Token]]) -> answers.Answer:
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
        answer = answers.Either((read(sides[0]), read(sides[-1])))
    elif is_rounded(sides[-1], sides[0]):
        answer = read(sides[0])
    else:
        answer = answers.Words("an approximation that does not hold")
    return answers.Named(name, answer) if name else answer


def _is_near(side: Sequence[Token], other: Sequence[Token]) -> bool:
    try:
        return close(parse(answers.measured(side).tokens), parse(answers.measured(other).tokens), _APPROXIMATION)
    except NotParsed:
        return False


def _inequality(tokens: Sequence[Token], sides: list[list[Token]], signs: list[str]) -> answers.Answer:
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
        return answers.Related(signs[0], answers.measured(sides[0]), answers.measured(sides[1]))
    return answers.Formula(tuple(tokens), answers.MeasureUnit())


def intersection(inequalities: Sequence[answers.Answer]) -> answers.Answer:
    """The meaning of inequalities joined by `and`.

    `x > 1 and x < 2` is one interval. Inequalities for different names are a list. All others are an `intersection`, which
    never equals a list or a union.
    """
    intervals = [bounds for item in inequalities if (bounds := _bounds(item)) is not None]
    names = {tuple(token.value for token in interval.name) for interval in intervals}
    if len(intervals) == len(inequalities) == len(names):
        return answers.Several("list", tuple(inequalities))
    if len(intervals) == len(inequalities) == 2:
        lower, upper = sorted(intervals, key=lambda interval: interval.high.tokens != _INFINITY)
        unbounded = lower.high.tokens == _INFINITY and upper.low.tokens[-1:] == _INFINITY
        if unbounded and _is_below(lower.low, upper.high):
            brackets = lower.brackets[0] + upper.brackets[1]
            return answers.Named(lower.name, answers.Several(brackets, (lower.low, upper.high), sure=True))
    return answers.Several("intersection", tuple(inequalities))


def _bounds(answer: answers.Answer) -> _Bounds | None:
    """The bounds that an interval for a name gives; None for any other answer."""
    if not isinstance(answer, answers.Named) or not isinstance(answer.value, answers.Several) or len(answer.value.items) != 2:
        return None
    low, high = answer.value.items
    if not isinstance(low, answers.Formula) or not isinstance(high, answers.Formula):
        return None
    return _Bounds(answer.name, answer.value.kind, low, high)


def _is_below(low: answers.Formula, high: answers.Formula) -> bool:
    try:
        ends = [exact(parse(side.tokens)) for side in (low, high)]
    except (NotParsed, NoValue):
        return False
    values = [end for end in ends if end is not None]
    return len(values) < 2 or values[0] < values[1]


def _has_variable(side: Sequence[Token]) -> bool:
    return any(token.kind == "letter" and token.value not in _NOT_NAMES for token in side)


def _interval(name: Sequence[Token], brackets: str, low: Sequence[Token], high: Sequence[Token]) -> answers.Named:
    return answers.Named(tuple(name), answers.Several(brackets, (answers.measured(low), answers.measured(high)), sure=True))
