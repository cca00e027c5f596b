"""The kinds of answers."""

from __future__ import annotations

from typing import NamedTuple, Union

from dflash_mcmc.grading.math.tokens import Token
from dflash_mcmc.grading.math.units import MeasureUnit

ORDERED = ("()", "[]", "(]", "[)", "<>")
"""Brackets whose items are ordered: tuples and intervals."""


class Words(NamedTuple):
    """An answer in words, which is compared as words and never as a product of letters."""

    text: str


class ChoiceAnswer(NamedTuple):
    """The letter of a choice, as in `(C)`, and the text of the choice if the answer contains it."""

    letter: str
    meaning: Answer | None


class Based(NamedTuple):
    """Digits in a base other than ten, e.g. `52_8`."""

    digits: str
    base: int


class Formula(NamedTuple):
    """Mathematics without commas or relations outside brackets, its unit, and its factor (1000 for `5 thousand`)."""

    tokens: tuple[Token, ...]
    unit: MeasureUnit
    multiplier: int = 1


class Several(NamedTuple):
    """Several answers. `kind` is one of:

    - `list`, `set`, `union`: the order of the items does not matter;
    - `intersection`: conditions that must all hold; it never equals a list, a set or a union;
    - `ordered`, or a pair of brackets such as `()`, `[)` or `<>`: the order matters.

    Intervals have no kind of their own, because `(1,2)` may be an interval or a point.
    """

    kind: str
    items: tuple[Answer, ...]
    sure: bool = False
    """Whether the answer cannot be a point: it is a `list` of solutions (`1 or 2`, `x = 1, x = 2`) or an open interval
    (`1 < x < 2`)."""


class Matrix(NamedTuple):
    """A matrix: its rows of entries, and the tokens of the factor before it."""

    rows: tuple[tuple[Answer, ...], ...]
    factor: tuple[Token, ...]


class Named(NamedTuple):
    r"""`name = value`, or `name \in value`, or an interval written as inequalities for the name."""

    name: tuple[Token, ...]
    value: Answer


class Related(NamedTuple):
    r"""Two formulas and the relation between them: `=`, `<`, `\leq` or `\neq`. `a > b` is stored as `b < a`."""

    sign: str
    left: Formula
    right: Formula


class Either(NamedTuple):
    r"""Two forms of one answer, e.g. `\sqrt{2} \approx 1.41`. Another answer needs to equal only one of the forms."""

    answers: tuple[Answer, ...]


Answer = Union[Words, ChoiceAnswer, Based, Formula, Several, Matrix, Named, Related, Either]  # noqa: UP007
