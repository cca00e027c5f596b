"""The steps of an answer that can be checked without a model: equations of plain arithmetic, such as `7*24=140+28=168`.

An equation is a chain of two or more sides of numbers, + - * / x × ÷ · (and their LaTeX commands) and parentheses, with at
least one operator. It is wrong if two sides differ as exact rational numbers, so a rounded side (`10/3=3.33`) is wrong too.
An equation next to letters, powers, percent signs and similar (`2x+3=7`, `2^3+1=9`) is skipped, because the whole expression
may mean something else. Only numbers, + - * / and parentheses are evaluated, by Python with fractions.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

_MOST_DIGITS = 15
"""Maximal number of digits of a number. Equations with longer numbers are skipped."""
_MOST_PARTS = 64
"""Maximal number of parts of an equation: numbers, signs, parentheses and spaces."""
_OPERATORS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "x": "*", "×": "*", "·": "*", "÷": "/", "−": "-"}
_PART = re.compile(r"""
    (?P<bullet>^[ \t]*[-*+•][ \t]+)
    |(?P<space>[ \t]+)
    |(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)
    |(?P<operator>\\(?:times|cdot|div)(?![a-zA-Z])|[-+*/×÷·−]|x(?![^\W\d_]))
    |(?P<bracket>[()])
    |(?P<equals>=)
    |(?P<edge>\n|\\[()\[\]]|\\(?:text|quad)(?![a-zA-Z])|[.,;:?"'<>|$\[\]{}])
    |(?P<word>[^\W\d_]+)
    |(?P<other>.)""", re.VERBOSE | re.MULTILINE | re.DOTALL)
_NOT_PLAIN = re.compile(r"[n)][n(]|[-+*/][-+*/]|(?:^|[=(])[+*/]|\(\)")
"""What Python reads and plain arithmetic has not: calls, signs in a row or first, and empty tuples. `n` is a number."""
_OPERATION = re.compile(r"[n)][-+*/]")
_IN_EQUATION = ("number", "operator", "bracket", "equals")


class AnswerStep(NamedTuple):
    """An equation in a text."""

    text: str
    start: int
    stop: int
    """The equation is text[start:stop]."""
    wrong: bool


def steps(text: str) -> list[AnswerStep]:
    """All equations of a text, in order."""
    parts = list(_PART.finditer(text))
    equations = []
    for first, last in _runs(parts):
        if last - first > _MOST_PARTS or not (_free_before(parts, first) and _free_after(parts, last)):
            continue
        wrong, first, last = _judged(parts, first, last)
        if wrong is not None:
            start, stop = parts[first].start(), parts[last - 1].end()
            equations.append(AnswerStep(text[start:stop], start, stop, wrong))
    return equations


def ends(decode: Callable[[np.ndarray], str], tokens: np.ndarray) -> list[int]:
    """The length of the text after each token: token n wrote text[ends[n - 1] : ends[n]].

    A character that several tokens make belongs to the last of them. Each token is decoded together with the piece before
    it, because some tokenizers write a token differently depending on its predecessor.
    """
    lengths, length, piece, decoded = [], 0, 0, 0
    for index in range(1, len(tokens) + 1):
        before, after = decode(tokens[piece:decoded]), decode(tokens[piece:index])
        if not after.endswith("\ufffd"):  # the decoder's sign for an incomplete character
            length += len(after) - len(before)
            piece, decoded = decoded, index
        lengths.append(length)
    return lengths


def inside(step: AnswerStep, ends: Sequence[int]) -> range:
    """The tokens that write any part of a step."""
    first, last = bisect.bisect_right(ends, step.start), bisect.bisect_left(ends, step.stop)
    return range(first, min(last + 1, len(ends)))


def _runs(parts: list[re.Match]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the longest runs of numbers, signs and spaces that contain an equals sign."""
    stretches = itertools.groupby(range(len(parts)), key=lambda n: parts[n].lastgroup in (*_IN_EQUATION, "space"))
    for of_equation, numbers in stretches:
        own = [n for n in numbers if parts[n].lastgroup != "space"]
        if of_equation and any(parts[n].lastgroup == "equals" for n in own):
            yield own[0], own[-1] + 1


def _free_before(parts: list[re.Match], first: int) -> bool:
    """Whether an equation may start here: at the start of the text, after an edge, or after a word and a space.

    A sign after a word is excluded, because it may be an operator with a name on its left side. A place after `1.` or `1,` is
    excluded, because the number may continue.
    """
    before = [*parts[max(0, first - 2) : first]]
    kinds = [part.lastgroup for part in before]
    if kinds[-1:] == ["space"]:
        return kinds[0] != "other" and not (kinds[0] == "word" and parts[first].lastgroup == "operator")
    if kinds[-1:] == ["edge"]:
        text = before[-1].group()
        return text != "}" and not (text in ".," and kinds[0] == "number")
    return kinds[-1:] in ([], ["bullet"])


def _free_after(parts: list[re.Match], last: int) -> bool:
    """Whether an equation may end here. After `0.`, further digits may follow in another notation."""
    after = parts[last : last + 2]
    kinds = [part.lastgroup for part in after]
    if kinds[:1] == ["space"] or (kinds[:1] == ["edge"] and after[0].group() in ".,"):
        return kinds[-1] != "other"
    return kinds[:1] in ([], ["edge"])


def _judged(parts: list[re.Match], first: int, last: int) -> tuple[bool | None, int, int]:
    """(wrong, start, stop): whether the sides differ, and the equation's parts, `parts[start:stop]`.

    `wrong` is None if the parts contain no equation. A parenthesis that opens before the equation or closes after it is not
    part of the equation, as in `(since 2+3=5)`.
    """
    for left, right in itertools.product((0, 1), repeat=2):
        start, stop = first + left, last - right
        if (left and parts[first].group() != "(") or (right and parts[last - 1].group() != ")"):
            continue
        own = [part for part in parts[start:stop] if part.lastgroup != "space"]
        wrong = _wrong([(part.lastgroup, part.group()) for part in own])
        if wrong is None:
            continue
        while parts[start].lastgroup == "space":
            start += 1
        while parts[stop - 1].lastgroup == "space":
            stop -= 1
        return wrong, start, stop
    return None, first, last


def _wrong(parts: Sequence[tuple[str | None, str]]) -> bool | None:
    """Whether the sides of an equation differ; None if the parts (kind, text) are no equation or have no value."""
    texts = [_OPERATORS.get(text, text).replace(",", "") for _, text in parts]
    shape = "".join("n" if kind == "number" else text for (kind, _), text in zip(parts, texts, strict=True))
    digits = [sum(map(str.isdigit, text)) for text in texts]
    if "=" not in shape or not _OPERATION.search(shape) or _NOT_PLAIN.search(shape) or max(digits) > _MOST_DIGITS:
        return None
    numbers = {f"n{place}": Fraction(text) for place, ((kind, _), text) in enumerate(zip(parts, texts, strict=True))
               if kind == "number"}
    sides = "".join(f"n{place}" if f"n{place}" in numbers else text for place, text in enumerate(texts)).split("=")
    try:
        return len({eval(side, {"__builtins__": {}}, numbers) for side in sides}) > 1
    except (SyntaxError, ZeroDivisionError):
        return None
