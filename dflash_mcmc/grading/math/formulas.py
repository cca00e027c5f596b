"""A formula as a tree, and the numbers in it."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from dflash_mcmc.grading.limits import MAX_EXPONENT, Unsupported


class NotParsed(Exception):
    """Tokens that are no expression of this grammar. The message says what is in the way."""


class Node(NamedTuple):
    """A formula. `kind`: number, symbol, constant, add, multiply, divide, power, root, negate, call, absolute, factorial,
    binomial, degrees, floor, ceil.
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | str | None = None
    """The number; the index of the root; the name of the symbol, constant (pi, e, i, oo) or function."""


def decimal(text: str) -> Fraction:
    """Exact value of a number's token. Raises Unsupported for an exponent beyond the limit."""
    mantissa, _, exponent = text.partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unsupported("exponent")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def repeating(text: str) -> Fraction:
    """Exact value of `whole.fixed(period)`."""
    whole, _, rest = text.partition(".")
    fixed, _, period = rest.rstrip(")").partition("(")
    return Fraction(f"{whole}.{fixed or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
