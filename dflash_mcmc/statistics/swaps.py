"""Paired permutation tests: the members of a pair have the same law under the null hypothesis, so they can be swapped.

Whole generations are swapped, so the tokens of a generation may depend on each other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dflash_mcmc.rng import Key

_SWAPS = 2000
_EXPECTED = 5.0
"""Smallest expected count of a cell; rarer cells share one cell."""


class SwapTest(NamedTuple):
    """The result of a test of two samples of n pairs."""

    distance: float
    """Distance of the two samples."""
    noise: float
    """Mean distance under the null hypothesis."""
    p: float
    """Share of the 2,001 assignments, including the observed one, whose statistic is at least the observed one's."""


def histograms(one: np.ndarray, other: np.ndarray) -> SwapTest:
    """Compares counts (pairs, cells). The statistic is the two-sample chi-square, the distance the total variation."""
    one, other = (np.asarray(part, np.float64) for part in (one, other))
    whole = (one + other).sum(axis=0)
    rare = whole < 2.0 * _EXPECTED
    pairs = [np.column_stack([part[:, ~rare], part[:, rare].sum(axis=1)]) for part in (one, other)]
    pairs = [part[:, np.append(whole[~rare], whole[rare].sum()) > 0.0] for part in pairs]
    total, signs = (pairs[0] + pairs[1]).sum(axis=0), _signs(len(one))
    first = 0.5 * (total + signs @ (pairs[0] - pairs[1]))
    second = total - first
    sizes = first.sum(axis=1, keepdims=True), second.sum(axis=1, keepdims=True)
    chi_square = sum(((part - size * total / total.sum()) ** 2 / (size * total / total.sum())).sum(axis=1)
                     for part, size in zip((first, second), sizes, strict=True))
    distance = 0.5 * np.abs(first / sizes[0] - second / sizes[1]).sum(axis=1)
    return SwapTest(float(distance[0]), float(distance[1:].mean()), _p(chi_square))


def means(one: np.ndarray, other: np.ndarray) -> SwapTest:
    """Compares the means of values (pairs,). The distance is the absolute difference."""
    difference = np.abs(_signs(len(one)) @ (np.asarray(one, np.float64) - other)) / len(one)
    return SwapTest(float(difference[0]), float(difference[1:].mean()), _p(difference))


@lru_cache(maxsize=4)
def _signs(pairs: int) -> np.ndarray:
    """(1 + swaps, pairs) of 1 and -1, where -1 swaps a pair. The first row is the observed assignment."""
    uniforms = Key(0).fold_in("swaps").uniforms(0, _SWAPS * pairs).reshape(_SWAPS, pairs)
    return np.concatenate([np.ones((1, pairs)), np.where(uniforms < 0.5, -1.0, 1.0)])


def _p(statistic: np.ndarray) -> float:
    """The p-value of a statistic (1 + swaps,), whose first value is the observed one.

    A tolerance counts values that differ by rounding as equal.
    """
    return float(np.mean(statistic >= statistic[0] * (1.0 - 1e-9) - 1e-12))
