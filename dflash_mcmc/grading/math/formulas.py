"""The tree of a formula, and exact values of numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from dflash_mcmc.grading.limits import MAX_EXPONENT, Unsupported


class NotParsed(Exception):
    """The tokens are not an expression of the grammar. The message names the token that is unexpected or missing."""


class Node(NamedTuple):
    """A formula. `kind` is number, symbol, constant, add, multiply, divide, power, root, negate, call, absolute, factorial,
    binomial, degrees, floor, ceil.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | str | None = None
    """The value of a number, the index of a root, or the name of a symbol, constant (pi, e, i, oo) or function."""

    @property
    def number(self) -> Fraction:
        """`value` of a number or a root."""
        if not isinstance(self.value, Fraction):
            raise TypeError(f"a {self.kind} has no number")
        return self.value

    @property
    def name(self) -> str:
        """`value` of a symbol, constant or function."""
        if not isinstance(self.value, str):
            raise TypeError(f"a {self.kind} has no name")
        return self.value


def decimal(text: str) -> Fraction:
    """Exact value of a `number` token. Raises Unsupported for an exponent beyond the limit."""
    mantissa, _, exponent = text.partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unsupported("exponent")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def repeating(text: str) -> Fraction:
    """Exact value of a `repeating` token, `whole.fixed(period)`."""
    whole, _, rest = text.partition(".")
    fixed, _, period = rest.rstrip(")").partition("(")
    return Fraction(f"{whole}.{fixed or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
