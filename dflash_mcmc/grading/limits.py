"""Limits on answers, so that no parser or algebra system gets an answer that it cannot handle in bounded time."""

from __future__ import annotations

import re

MAX_LENGTH = 400
"""The largest number of characters in an answer."""
MAX_DIGITS = 60
"""The largest number of consecutive digits."""
MAX_NESTING = 25
"""The largest depth of nested brackets."""
MAX_EXPONENT = 9_999
"""Largest absolute exponent of a number, also in scientific notation."""
MAX_FACTORIAL = 999
"""Largest argument of a factorial and of a binomial coefficient."""
MAX_BITS = 250_000
"""The largest number of bits in the numerator or denominator of an exact number."""

_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_BRACKET = re.compile(r"(\\?[{(\[]|\\left(?![a-zA-Z])|\\begin)|(\\?[})\]]|\\right(?![a-zA-Z])|\\end)")


class Unsupported(Exception):
    """An answer exceeds a limit. The message is the name of the limit."""


def check_size(answer: str) -> None:
    """Raises Unsupported for an answer that is too long, has too many consecutive digits, or nests brackets too deeply."""
    if len(answer) > MAX_LENGTH:
        raise Unsupported("length")
    if _DIGITS.search(answer):
        raise Unsupported("digits")
    depth = 0
    for bracket in _BRACKET.finditer(answer):
        depth += 1 if bracket.group(1) else -1
        if depth > MAX_NESTING:
            raise Unsupported("nesting")
