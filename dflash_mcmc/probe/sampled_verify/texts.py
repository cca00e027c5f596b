"""Measures of degeneration: how much a text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

_TAIL, _TIMES = 100, 4
"""A text ends in a loop if its last 100 tokens repeat one period, which fits into them at least 4 times."""


def distinct(tokens: Sequence[int], n: int) -> float:
    """Number of different n-grams divided by the number of all n-grams; 1 for a text shorter than n tokens."""
    grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest run of tokens that occurs at two places, which may overlap."""
    low, high = 0, len(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        places = len(tokens) - middle + 1
        repeated = len({tuple(tokens[start : start + middle]) for start in range(places)}) < places
        low, high = (middle, high) if repeated else (low, middle)
    return low


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the end of the text repeats one period."""
    tail = list(tokens[-_TAIL:])
    return len(tail) == _TAIL and any(tail[period:] == tail[:-period] for period in range(1, _TAIL // _TIMES + 1))
