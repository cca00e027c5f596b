"""What is refused before anything reads it: no parser or algebra sees an answer that could take it for ever."""

from __future__ import annotations

import re

MAX_LENGTH = 400
MAX_DIGITS = 60
MAX_NESTING = 25
MAX_EXPONENT = 9_999
"""Of a power of a number, and of ten in scientific notation."""
MAX_FACTORIAL = 999
"""Of a factorial, and of both numbers of a binomial coefficient."""
MAX_BITS = 250_000
"""Of the numerator or denominator of an exact number."""

_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_BRACKET = re.compile(r"(\\?[{(\[]|\\left(?![a-zA-Z])|\\begin)|(\\?[})\]]|\\right(?![a-zA-Z])|\\end)")


class Unsupported(Exception):
    """An answer is beyond a limit. The message is the limit's name."""


def check_size(answer: str) -> None:
    """Raises Unsupported for an answer that is too long, or has too many digits in a row or brackets in brackets."""
    if len(answer) > MAX_LENGTH:
        raise Unsupported("length")
    if _DIGITS.search(answer):
        raise Unsupported("digits")
    depth = 0
    for bracket in _BRACKET.finditer(answer):
        depth += 1 if bracket.group(1) else -1
        if depth > MAX_NESTING:
            raise Unsupported("nesting")
