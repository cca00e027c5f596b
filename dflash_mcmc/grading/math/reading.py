r"""An answer read as one kind: a choice, words, a number in a base, a list, tuple or interval, an equation, or a formula."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from dflash_mcmc.grading.math import algebra
from dflash_mcmc.grading.math.latex import depths, enclosed, is_number, is_word, split, tokenise
from dflash_mcmc.grading.math.units import NUMBERS, PERCENT, SEPARATORS, measured


class ReadAnswer(NamedTuple):
    r"""An answer of one kind, with its `form` and its `parts`, which are tokens.

    | kind | form | parts |
    |---|---|---|
    | `either` | | two forms of one answer, of `\sqrt{2} \approx 1.41` |
    | `named` | | the name and its value, of `x = 5`, `x \in (1,2)` and `1 < x < 2` |
    | `choice` | its letter | the text of the choice, if it is given |
    | `words` | the text | |
    | `base` | digits and base | |
    | `relation` | `=`, `<`, `\leq` or `\neq` | the two sides; `a > b` is `b < a` |
    | `several` | `list`, `set`, `union`, `intersection`, `ordered`, or brackets, as `(]` | the items |
    | `formula` | | one: everything else |
    """

    kind: str
    form: str = ""
    parts: tuple[tuple[str, ...], ...] = ()
    sure: bool = False
    """Whether it cannot be a point: it is a list of solutions (`1 or 2`, `x = 1, x = 2`) or an open interval (`1 < x < 2`)."""


_FALSE = ('"an equation that does not hold',)


def readings(text: str) -> list[ReadAnswer]:
    """The possible meanings of a string. There are two if the string has a comma that may group digits, as in `1,234`."""
    tokens, ungrouped = (tokenise(text, grouping) for grouping in (True, False))
    if tokens == ungrouped:
        return [read(tokens)]
    answer = read(ungrouped)
    return [read(tokens), answer._replace(form="ordered") if answer.form == "list" else answer]


def _is_separator(token: str) -> bool:
    return token in (",", ";") or (is_word(token) and token[1:].strip(" ,").lower() in SEPARATORS)


def _unwrapped(tokens: Sequence[str]) -> tuple[str, ...]:
    """Removes braces around all tokens, a leading `=`, `:` or `\\approx`, and trailing punctuation."""
    while True:
        pair = enclosed(tokens)
        if pair and pair[0] == "{{":
            tokens = pair[1]
        elif tokens and tokens[0] in ("=", r"\approx", ":"):
            tokens = tokens[1:]
        elif tokens and tokens[-1] in (".", ",", ";", ":", r"\\"):
            tokens = tokens[:-1]
        else:
            return tuple(tokens)


def _with_signs(tokens: Sequence[str]) -> list[tuple[str, ...]]:
    r"""Both answers of a plus-or-minus, four of two; `\mp` takes the opposite sign."""
    if r"\pm" not in tokens:
        tokens = [r"\pm" if token == r"\mp" else token for token in tokens]
    count = tokens.count(r"\pm")
    if not 0 < count <= 2 or (count == 2 and r"\mp" in tokens):
        return [tuple(tokens)]
    expanded = []
    for signs in itertools.product("+-", repeat=count):
        left, opposite = list(signs), "-+"["-" in signs]
        expanded.append(tuple(left.pop(0) if token == r"\pm" else opposite if token == r"\mp" else token for token in tokens))
    return expanded


def read(tokens: Sequence[str]) -> ReadAnswer:
    """Tokens as an answer of one kind."""
    tokens = _unwrapped(tokens)
    if len(tokens) > 1 and all(map(is_word, tokens)):
        return ReadAnswer("words", " ".join(token[1:] for token in tokens))
    parts, separators = split(tokens, _is_separator)
    joining = {token[1:].strip(" ,").lower() for token in separators if is_word(token)}
    orders = [order for part in parts if (order := _relation(_unwrapped(part))) and order.sure] if joining == {"and"} else []
    if orders and len(orders) == len(parts):
        return _intersection(parts, orders)
    parts = [part for part in parts if part]
    in_set = len(parts) == 1 and (enclosed(_unwrapped(parts[0])) or [""])[0] == r"\{\{"
    items = [item for part in parts for item in (_with_signs(part) if not in_set else [tuple(part)])]
    if len(items) != 1:
        named = [answer.parts[0] for answer in map(read, items) if answer.kind == "named"]
        point = len(set(named)) == len(items) and "or" not in joining
        return ReadAnswer("several", "list", tuple(items), len(items) > len(parts) or (bool(named or joining) and not point))
    tokens = _unwrapped(items[0])
    if len(tokens) == 1 and (word := tokens[0][1:].lower()) in NUMBERS:
        tokens = (str(NUMBERS[word]),)
    for kind in (_choice_of, _words_of, _relation, _brackets, _based):
        if answer := kind(tokens):
            return answer
    return ReadAnswer("formula", "", (tokens,))


_LETTER = re.compile(r"\(?\s*([A-Ja-j])\s*\)?[.:]?")
_LABELLED = re.compile(r'"\(([A-J])\)\s*([^A-Za-z]*\d[^A-Za-z]*)')
_OPTION = re.compile(r"(?i:option|choice) ?\(? ?([A-J]) ?\)?")


def _choice_of(tokens: tuple[str, ...]) -> ReadAnswer | None:
    """A choice such as `(C)`, `(C) 12` or `option C`; None for other tokens."""
    first = tokens[0] if tokens else ""
    if option := _OPTION.fullmatch(" ".join(token.lstrip('"') for token in tokens)):
        return ReadAnswer("choice", option[1])
    if len(tokens) == 1 and (labelled := _LABELLED.fullmatch(first)):
        return ReadAnswer("choice", labelled[1], (tuple(tokenise(labelled[2])),))
    if len(tokens) > 1 and first[:1] == '"' and not first[1:].isalpha() and (match := _LETTER.fullmatch(first[1:])):
        return ReadAnswer("choice", match[1].upper(), (tokens[1:],))
    if first == "(" and tokens[2:3] == (")",) and _LETTER.fullmatch(tokens[1]):
        rest = tokens[3:]
        if not rest or is_word(rest[0]) or is_number(rest[0]) or rest[0] in (r"\frac", r"\sqrt"):
            return ReadAnswer("choice", tokens[1].upper(), (rest,) if rest else ())
    return None


def _words_of(tokens: tuple[str, ...]) -> ReadAnswer | None:
    if tokens and (not is_word(tokens[0]) or tokens[0][1:].lower() in NUMBERS):
        return None
    readable = all(is_word(token) or is_number(token) or token in ".,:;!?'()-&#" for token in tokens)
    return ReadAnswer("words", " ".join(token.lstrip('"') for token in tokens)) if readable else None


_BASED = re.compile(r"(-? ?)(\( ?)?(\d[\dA-F ]*?)(?(2) ?\)) ?(?:_ ?(?:\(?(?:in )?base ?)?|\(?(?:in )?base ?)"
                    rf"(\d{{1,2}}|{'|'.join(NUMBERS)})\)?", re.IGNORECASE)


def _based(tokens: tuple[str, ...]) -> ReadAnswer | None:
    r"""`52_8`, `52_{8}`, `(52)_8`, `52_{\text{eight}}` and `52 \text{ base } 8`; `52_{10}` is 52."""
    match = _BASED.fullmatch(" ".join(token.lstrip('"') for token in tokens if token not in "{}"))
    base = int(NUMBERS.get(match[4].lower(), match[4])) if match else 0
    digits = match[3].replace(" ", "").upper().lstrip("0") or "0" if match else ""
    if match is None or any(int(digit, 16) >= base for digit in digits):
        return None
    sign = match[1].strip()
    return ReadAnswer("base", f"{sign}{digits}_{base}") if base != 10 else ReadAnswer("formula", "", ((*sign, digits),))


def _brackets(tokens: tuple[str, ...]) -> ReadAnswer | None:
    """A union, a set, a tuple or an interval; None for a formula."""
    parts, unions = split(tokens, lambda token: token == r"\cup")
    pair = enclosed(tokens)
    if unions or tokens == (r"\emptyset",):
        return ReadAnswer("several", "union" if unions else "set", tuple(map(tuple, parts)) if unions else ())
    if pair is None or pair[0] in ("floorfloor", "ceilceil"):
        return None
    kind, content = pair
    parts = split(content, _is_separator)[0]
    if kind == r"\{\{":
        (name, *condition), bars = split(content, lambda token: token in ("|", ":"))
        if len(bars) == len(parts) == 1 and _is_name(name[:1]) and "".join(name[1:]) in ("", r"\in\mathbb{R}", r"\in\mathbbR"):
            return read(condition[0])
        return ReadAnswer("several", "set", tuple(item for part in parts if part for item in _with_signs(part)))
    if len(parts) == 1 and kind in ("()", "[]"):
        return read(content) if kind == "()" or read(content).kind != "formula" else None
    return ReadAnswer("several", kind, tuple(map(tuple, parts)), tokens[0] == "⦅")


_RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq", r"\approx", r"\in")
_REVERSED = {">": "<", r"\geq": r"\leq"}
_OPERATORS = {"+", "-", "/", r"\cdot", "^", r"\frac", r"\sqrt", "!", ",", r"\pm", r"\binom"}
_NOT_NAMES = {"e", "i", r"\pi", r"\infty", r"\degree"}


def _relation(tokens: tuple[str, ...]) -> ReadAnswer | None:
    """An equation, inequality or approximation; None without a relation outside brackets. `sure` is set for inequalities."""
    sides, signs = split(tokens, lambda token: token in _RELATIONS)
    if not signs:
        return None
    unread = ReadAnswer("formula", "", (tokens,))
    if not all(sides) or any(side[-1] == "/" for side in sides):  # `x /= 5` and `x =/= 5` mean "not equal"
        return unread
    if r"\approx" in signs:
        return _approximation(sides)
    variable = [any(token.isalpha() and token not in _NOT_NAMES for token in side) for side in sides]
    if set(signs) == {"="}:
        # a sum that a problem asks for, e.g. `m + n = 25`, is a name; sums with x, y or z are lines
        asked = re.fullmatch(r"[a-df-hj-wA-Z](?:\+[a-df-hj-wA-Z])*", "".join(sides[0])) and not variable[-1]
        if _is_name(sides[0]) or asked:
            return _named_answer(sides[0], _result(sides[1:]))
        if len(sides) == 2 and _is_name(sides[1]):
            return _named_answer(sides[1], sides[0])
        if not any(variable):
            return read(_result(sides))
    elif signs == [r"\in"] and _is_name(sides[0]):
        pair = enclosed(sides[1])
        return _named_answer(sides[0], ["⦅", *pair[1], "⦆"] if pair and pair[0] == "()" else sides[1])
    elif set(signs) <= set(_REVERSED):
        sides, signs, variable = sides[::-1], [_REVERSED[sign] for sign in signs[::-1]], variable[::-1]
    if set(signs) <= {"<", r"\leq"}:
        names = [index for index, side in enumerate(sides) if _is_name(side)]
        bounded = sum(variable) <= 1 and len(names) == 1
        opened, closed = ([pair[sign == r"\leq"] for sign in signs] for pair in ("⦅[", "⦆]"))
        if bounded and len(sides) == 3 and names == [1]:
            return _named_answer(sides[1], [opened[0], *sides[0], ",", *sides[2], closed[1]], True)
        if bounded and len(sides) == 2:
            below = ["⦅", "-", r"\infty", ",", *sides[1], closed[0]]
            return _named_answer(sides[names[0]], below if names == [0] else [opened[0], *sides[0], ",", r"\infty", "⦆"], True)
    if len(sides) != 2 or signs[0] not in ("=", "<", r"\leq", r"\neq"):
        return unread
    return ReadAnswer("relation", signs[0], tuple(map(tuple, sides)), sure=signs[0] in ("<", r"\leq"))


def _named_answer(name: Sequence[str], value: Sequence[str], sure: bool = False) -> ReadAnswer:
    return ReadAnswer("named", "", (tuple(name), tuple(value)), sure)


def _is_name(tokens: Sequence[str]) -> bool:
    """Whether tokens name a value: letters with indices, `f(x)`, `AB`, `AB/CD`, words or `(x,y)`; no numbers or operations."""
    negated = re.search(r'\\(not|neg|lnot) |["\s]not ', "".join(f"{token} " for token in tokens), re.IGNORECASE)
    if not 0 < len(tokens) <= 16 or negated or (len(tokens) == 1 and tokens[0] in _NOT_NAMES):
        return False
    if list(tokens[1:6]) == ["^", "{", "-", "1", "}"] and tokens[6:7] == ["("]:
        tokens = [tokens[0], *tokens[6:]]  # the inverse of a function, `f^{-1}(x)`
    if r"\frac" in tokens or "/" in tokens:
        tokens = [token for token in tokens if token not in (r"\frac", "/", "{", "}")]
        if any(map(is_number, tokens)):
            return False
    outside = zip(["", *tokens], tokens, depths(tokens), strict=False)
    if any(not depth and (token in _OPERATORS or (is_number(token) and before != "_")) for before, token, depth in outside):
        return False
    return any(token[0].isalpha() or is_word(token) or (token[0] == "\\" and token not in _OPERATORS) for token in tokens)


_SIZES = (
    {"mm": 1, "cm": 10, "m": 10**3, "km": 10**6}, {"in": 1, "ft": 12, "yd": 36, "mi": 63_360}, {"oz": 1, "lb": 16},
    {"mg": 1, "g": 10**3, "kg": 10**6}, {"month": 1, "year": 12}, {"s": 1, "min": 60, "h": 3600, "day": 86400, "week": 604800},
    {"ml": 1, "l": 10**3}, {"cup": 1, "pint": 2, "quart": 4, "gal": 16}, {"cent": 1, "dollar": 100})
"""Units that can be converted into each other, with their sizes as multiples of the smallest."""


def _result(sides: Sequence[Sequence[str]]) -> Sequence[str]:
    """The answer in a chain such as `3 + 4 = 7`: its last side, if all sides with rational values are equal."""
    quantities = [(value * side.factor, side) for side in map(measured, sides) if (value := _exact(side.tokens)) is not None]
    for (a, one), (b, other) in itertools.combinations(quantities, 2):
        sizes = next((sizes for sizes in _SIZES if {one.unit, other.unit} <= {*sizes} and one.power == other.power), None)
        if sizes:
            holds = a * sizes[one.unit] ** one.power == b * sizes[other.unit] ** other.power
        else:
            holds = a == b or (a / 100 if one.unit == PERCENT else a) == (b / 100 if other.unit == PERCENT else b)
        if not holds:
            return _FALSE
    return sides[-1]


def _exact(tokens: Sequence[str]) -> Fraction | None:
    """The exact value of a formula; None if it is not rational or no formula."""
    try:
        return algebra.exact(algebra.formula(tuple(tokens)))
    except algebra.NotParsed:
        return None


def _approximation(sides: list[list[str]]) -> ReadAnswer:
    r"""`exact \approx approximate`, possibly after a name.

    If the sides differ by at most 1 %, either side is accepted. Otherwise only the exact side is accepted, and only if it
    rounds to the other side.
    """
    name = sides.pop(0) if _is_name(sides[0]) else []
    forms = [sides[0]]
    if len(sides) > 1:
        first, last = measured(sides[0]), measured(sides[-1])
        decimal = re.fullmatch(r"-?\d*\.(\d+)", "".join(last.tokens))
        try:
            exactly, rounded = algebra.formula(first.tokens), algebra.formula(last.tokens)
            scale = 100 if last.unit == PERCENT != first.unit else 1
            if algebra.near(exactly, rounded, relative=0.01):
                forms = [sides[0], sides[-1]]
            elif decimal is None or not last.fits(first) or not algebra.near(
                    exactly * scale, rounded, Fraction(1, 2 * 10 ** len(decimal[1]))):
                forms = [list(_FALSE)]
        except algebra.NotParsed:
            forms = [list(_FALSE)]
    return ReadAnswer("either", "", tuple((*name, *(["="] if name else []), *form) for form in forms))


def _intersection(parts: Sequence[Sequence[str]], orders: Sequence[ReadAnswer]) -> ReadAnswer:
    """Inequalities joined by `and`: one interval for `x > 1 and x < 2`, a list for different names, else an intersection."""
    named = {order.parts[0] for order in orders if order.kind == "named"}
    several = ReadAnswer("several", "list" if len(named) == len(parts) else "intersection", tuple(map(tuple, parts)))
    if len(parts) == 2 and len(named) == 1 and all(order.kind == "named" for order in orders):
        lower, upper = sorted((order.parts[1] for order in orders), key=lambda value: value[1:4] == ("-", r"\infty", ","))
        if lower[-3:-1] == (",", r"\infty") and upper[1:4] == ("-", r"\infty", ","):
            ends = _exact(lower[1:-3]), _exact(upper[4:-1])
            if ends[0] is None or ends[1] is None or ends[0] < ends[1]:
                return _named_answer(named.pop(), (*lower[:-2], *upper[4:]))
    return several
