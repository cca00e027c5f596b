"""Weights and resampling of particles.

Del Moral, Doucet & Jasra 2006, "Sequential Monte Carlo samplers"; Douc & Cappe 2005, "Comparison of resampling schemes".
Log-weights are float64 (N,), in nats. A minus infinity is a weight of zero.
"""

from __future__ import annotations

import numpy as np

from dflash_mcmc.rng import Key

_EQUAL = 1e-9
"""Relative rounding of an effective sample size. Equal weights must not count as unequal ones."""


def log_mean(log_weights: np.ndarray) -> float:
    """The logarithm of the mean weight."""
    largest = float(log_weights.max())
    return largest + float(np.log(np.mean(np.exp(log_weights - largest))))


def shares(log_weights: np.ndarray) -> np.ndarray:
    """Normalised weights, float64 (N,)."""
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def effective_size(log_weights: np.ndarray) -> float:
    """The effective sample size (sum w)^2 / sum w^2, from 1 to N (Kong, Liu & Wong 1994)."""
    return 1.0 / float(np.sum(shares(log_weights) ** 2))


def is_low(log_weights: np.ndarray, threshold: float) -> bool:
    """Whether the effective sample size is below this share of the number of particles."""
    return effective_size(log_weights) < threshold * len(log_weights) * (1.0 - _EQUAL)


def multinomial(log_weights: np.ndarray, count: int, key: Key) -> list[int]:
    """`count` independent parents, each drawn in proportion to its weight."""
    probabilities = shares(log_weights)
    return [key.fold_in(index).categorical(probabilities) for index in range(count)]


def systematic(log_weights: np.ndarray, key: Key) -> list[int]:
    """N parents, by one uniform number u0 that gives the points (u0 + i) / N of the cumulative weights.

    The parents change only at finitely many values of u0. The piece between two of them is drawn, so that the law of the
    parents can be enumerated.
    """
    count = len(log_weights)
    ends = np.cumsum(shares(log_weights))[:-1] * count
    breaks = np.unique(np.concatenate([[0.0, 1.0], ends - np.floor(ends)]))
    piece = key.categorical(np.diff(breaks))
    points = (breaks[piece] + breaks[piece + 1]) / 2.0 + np.arange(count)
    return np.searchsorted(ends, points, side="right").tolist()
