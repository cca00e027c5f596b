"""Tests whether two runs have the same law, from their samples of the same problems.

The test is a permutation test (Pitman 1937; Good 2005, "Permutation, Parametric and Bootstrap Tests of Hypotheses") within
problems: if the laws are equal, the samples of a problem can be exchanged between the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_PERMUTATIONS = 9999


class Agreement(NamedTuple):
    """The comparison of a number, such as log p, between the samples of two runs."""

    problems: int
    samples_a: int
    samples_b: int
    difference: float
    """Mean of `a` minus mean of `b`, averaged over problems."""
    p_value: float
    """Two-sided. Not adjusted for the number of comparisons."""


def agreement(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], seed: int = 0) -> Agreement | None:
    """Compares the means of two runs within each problem. None if they share no problem.

    Args:
        a: the values of each problem's independent samples.
        b: the same for the other run.
        seed: the seed of the permutations.
    """
    shared = [problem for problem in a if problem in b and len(a[problem]) and len(b[problem])]
    if not shared:
        return None
    generator = np.random.default_rng(seed)
    observed, permuted = 0.0, np.zeros(_PERMUTATIONS)
    for problem in shared:
        count = len(a[problem])
        values = np.array([*a[problem], *b[problem]], dtype=np.float64)
        rest = len(values) - count
        observed += values[:count].mean() - values[count:].mean()
        first = generator.permuted(np.tile(values, (_PERMUTATIONS, 1)), axis=1)[:, :count].sum(axis=1)
        permuted += first / count - (values.sum() - first) / rest
    # Sums in another order differ in their last bits. A permutation that restores the observed labels must count.
    at_least = int(np.sum(np.abs(permuted) >= abs(observed) - 1e-9 * (1.0 + abs(observed))))
    return Agreement(len(shared), sum(len(a[problem]) for problem in shared), sum(len(b[problem]) for problem in shared),
                     observed / len(shared), (1 + at_least) / (1 + _PERMUTATIONS))
