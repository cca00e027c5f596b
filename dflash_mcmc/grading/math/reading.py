"""Parses a string as one of the kinds of answers: words, a number in a base, a list, a tuple or interval, a matrix, etc."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from dflash_mcmc.grading.math import answers
from dflash_mcmc.grading.math.answers import Answer, Based, ChoiceAnswer, Formula, Matrix, Named, Several, Words
from dflash_mcmc.grading.math.relations import ORDERS, RELATIONS, intersection, is_name, related
from dflash_mcmc.grading.math.syntax import NotParsed, parse
from dflash_mcmc.grading.math.tokens import FACING, Token, depths, enclosed, facing, prefixed, split, tokenise
from dflash_mcmc.grading.math.units import measured
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


def readings(text: str) -> list[Answer]:
    """The possible meanings of a string. There are two if the string has a comma that may group digits, as in `1,234`."""
    tokens, ungrouped = (facing(prefixed(tokenise(text, grouping))) for grouping in (True, False))
    if tokens == ungrouped:
        return [read(tokens)]
    answer = read(ungrouped)
    return [read(tokens), answer._replace(kind="ordered") if isinstance(answer, Several) and answer.kind == "list" else answer]


def read(tokens: Sequence[Token]) -> Answer:
    """Parses tokens, which may be a list, as an answer."""
    tokens = _unwrapped(tokens)
    if len(tokens) > 1 and all(token.kind == "word" for token in tokens):
        return Words(" ".join(token.value for token in tokens))
    parts, separators = split(tokens, _is_separator)
    if {token.value.lower() for token in separators} == {"and"} and all(_is_inequality(part) for part in parts):
        return intersection([read_one(part) for part in parts])
    parts = [part for part in parts if part]
    items = [item for part in parts for item in _expand_signs(part)]
    if len(items) > 1:
        joining = {token.value.lower() for token in separators if token.kind == "word"}
        return _list([read_one(item) for item in items], joining, signed=len(items) > len(parts))
    return read_one(items[0]) if items else Words("")


def _list(items: Sequence[Answer], joining: set[str], signed: bool) -> Several:
    """A list of items. `signed` means that the list contains both signs of a plus-or-minus.

    A signed list is surely a list of solutions, not a point. A list with named items or joining words is also surely a list of
    solutions, unless each item has a different name and no word is `or`.
    """
    each, some = answers.names(items), any(isinstance(item, Named) for item in items)
    point = len(each or ()) == len(items) and "or" not in joining
    return Several("list", tuple(items), sure=signed or (not point and (some or bool(joining))))


def read_one(tokens: Sequence[Token]) -> Answer:
    """Parses tokens without commas outside brackets as an answer."""
    tokens = _unwrapped(tokens)
    for kind in (_choice, _words, _matrix):
        found = kind(tokens)
        if found is not None:
            return found
    if any(depth == 0 and token.value in RELATIONS for token, depth in zip(tokens, depths(tokens), strict=True)):
        return related(tokens, read)
    parts, unions = split(tokens, lambda token: token.value == r"\cup")
    if unions:
        return Several("union", tuple(read_one(part) for part in parts))
    pair = enclosed(tokens)
    if pair is not None:
        return _bracketed(*pair, tokens)
    if [token.value for token in tokens] == [r"\emptyset"]:
        return Several("set", ())
    return _based(tokens) or _formula(tokens)


def _formula(tokens: Sequence[Token]) -> Formula:
    number = measured(tokens)
    if len(number.tokens) == 1 and number.tokens[0].value.lower() in NUMBERS:
        return Formula((Token("number", str(NUMBERS[number.tokens[0].value.lower()])),), number.unit, number.multiplier)
    return Formula(number.tokens, number.unit, number.multiplier)


def _is_inequality(part: Sequence[Token]) -> bool:
    """Whether the tokens are an inequality."""
    return any(depth == 0 and token.value in ORDERS for token, depth in zip(part, depths(part), strict=True))


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
    places = [place for place, token in enumerate(tokens) if token.value == r"\pm"]
    if not 0 < len(places) <= _MAX_SIGNS or (pair is not None and pair[0] == r"\{\}"):
        return [tokens]
    if len(places) > 1 and any(token.value == r"\mp" for token in tokens):
        return [tokens]
    choices = itertools.product("+-", repeat=len(places))
    return [_with_signs(tokens, dict(zip(places, signs, strict=True))) for signs in choices]


def _with_signs(tokens: list[Token], signs: dict[int, str]) -> list[Token]:
    opposite = "-" if "+" in signs.values() else "+"
    return [Token("sign", signs[place]) if place in signs else Token("sign", opposite) if token.value == r"\mp" else token
            for place, token in enumerate(tokens)]


def _words(tokens: Sequence[Token]) -> Words | None:
    if not tokens:
        return Words("")
    first = tokens[0]
    if first.kind != "word" or first.value.lower() in NUMBERS:
        return None
    if all(token.kind in ("word", "number") or token.value in _PUNCTUATION for token in tokens):
        return Words(" ".join(token.value for token in tokens))
    return None


def _choice(tokens: Sequence[Token]) -> ChoiceAnswer | None:
    """Parses a choice such as `(C)`, `(C) 12` or `option C`; None for other tokens."""
    values = [token.value for token in tokens]
    if not tokens:
        return None
    if option := _OPTION.fullmatch(" ".join(values)):
        return ChoiceAnswer(option.group(1), None)
    if len(tokens) == 1 and tokens[0].kind == "word" and (labelled := _LABELLED.fullmatch(values[0])):
        return ChoiceAnswer(labelled.group(1), read(tokenise(labelled.group(2))))
    if tokens[0].kind == "word" and (match := _LETTER.fullmatch(values[0])) and len(tokens) > 1 and not values[0].isalpha():
        return ChoiceAnswer(match.group(1).upper(), read(tokens[1:]))
    if values[0] == "(" and values[2:3] == [")"] and tokens[1].kind == "letter" and _LETTER.fullmatch(values[1]):
        rest = tokens[3:]
        if not rest:
            return ChoiceAnswer(values[1].upper(), None)
        if (rest[0].spaced and rest[0].kind in ("number", "word")) or rest[0].value in (r"\frac", r"\sqrt"):
            return ChoiceAnswer(values[1].upper(), read(rest))
    return None


def _based(tokens: Sequence[Token]) -> Based | Formula | None:
    """Parses `52_8`, `52_{8}`, `(52)_8`, `52_{\\text{eight}}` and `52 \\text{ base } 8`; `52_{10}` is 52."""
    text = " ".join(token.value for token in tokens if token.value not in ("{", "}"))
    found = _BASED.fullmatch(text)
    if found is None:
        return None
    sign, _, digits, base = found.groups()
    digits, base = digits.replace(" ", "").upper().lstrip("0") or "0", int(NUMBERS.get(base.lower(), base))
    if any(int(digit, 16) >= base for digit in digits):
        return None
    if base == 10:
        return _formula([*([Token("sign", "-")] if sign.strip() else []), Token("number", digits)])
    return Based(f"{sign.strip()}{digits}", base)


def _matrix(tokens: Sequence[Token]) -> Matrix | None:
    begins = [place for place, token in enumerate(tokens) if token.kind == "begin"]
    if len(begins) != 1 or tokens[begins[0]].value not in _MATRICES:
        return None
    ends = [place for place, token in enumerate(tokens) if token.kind == "end"]
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
    return Matrix(tuple(tuple(read(cell) for cell in row) for row in cells), tuple(factor))


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


def _bracketed(kind: str, content: list[Token], tokens: Sequence[Token]) -> Answer:
    parts = split(content, _is_separator)[0]
    items = [item for part in parts for item in (_expand_signs(part) if kind == r"\{\}" else [part])]
    if kind == r"\{\}":
        builder, bars = split(content, lambda token: token.value in ("|", ":"))
        if len(bars) == 1 and len(items) == 1 and _is_set_variable(builder[0]):
            return read(builder[1])
        return Several("set", tuple(read(item) for item in items if item))
    if len(items) == 1 and kind in ("()", "[]"):
        inner = read(content)
        return inner if kind == "()" or not isinstance(inner, Formula) else _formula(tokens)
    return Several(kind, tuple(read(item) for item in items), sure=tokens[0].kind == FACING)
