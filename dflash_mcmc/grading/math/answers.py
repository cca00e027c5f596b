"""The kinds of answer that there are."""

from __future__ import annotations

from typing import NamedTuple, Union

from dflash_mcmc.grading.math.tokens import Token
from dflash_mcmc.grading.math.units import MeasureUnit

ORDERED = ("()", "[]", "(]", "[)", "<>")
"""Brackets that give what they hold an order."""


class Words(NamedTuple):
    """An answer in words. They are compared as words, never as the product of their letters."""

    text: str


class ChoiceAnswer(NamedTuple):
    """A letter of several choices, `(C)`, with what it stands for where that is written too."""

    letter: str
    meaning: Answer | None


class Based(NamedTuple):
    """Digits in a base other than ten, `52_8`."""

    digits: str
    base: int


class Formula(NamedTuple):
    """Mathematics without commas and relations outside of brackets, and the unit behind it."""

    tokens: tuple[Token, ...]
    unit: MeasureUnit
    multiplier: int = 1


class Several(NamedTuple):
    """Answers side by side: `kind` is `list`, `set`, `union`, or `ordered` or a pair of brackets, `()`, `[)`, `<>`, with an
    order.

    An interval is a pair in brackets, since `(1,2)` may be one or a point.
    """

    kind: str
    items: tuple[Answer, ...]
    sure: bool = False
    """Surely no point: a list is one of solutions (`1 or 2`, `x = 1, x = 2`), and `()` an interval (`1 < x < 2`)."""


class Matrix(NamedTuple):
    """Rows of entries, and the tokens of a factor before it."""

    rows: tuple[tuple[Answer, ...], ...]
    factor: tuple[Token, ...]


class Named(NamedTuple):
    r"""`name = value`, or `name \in value`, or an interval written as inequalities for the name."""

    name: tuple[Token, ...]
    value: Answer


class Related(NamedTuple):
    r"""Two formulas and what is between them: `=`, `<`, `\leq` or `\neq`. Greater is written as less."""

    sign: str
    left: Formula
    right: Formula


class Either(NamedTuple):
    r"""Two ways to write one answer, `\sqrt{2} \approx 1.41`: either will do."""

    answers: tuple[Answer, ...]


Answer = Union[Words, ChoiceAnswer, Based, Formula, Several, Matrix, Named, Related, Either]  # noqa: UP007
