"""Permutation tests: equal laws are not flagged, other laws are, and a p-value is exact for few pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflash_mcmc.rng import Key
from dflash_mcmc.statistics import paired


def counts(name: str, pairs: int, law: list[float]) -> np.ndarray:
    """Histograms (pairs, tokens) of 20 tokens each."""
    tokens = np.searchsorted(np.cumsum(law)[:-1], Key(1).fold_in(name).uniforms(0, 20 * pairs)).reshape(pairs, 20)
    return np.stack([np.bincount(mine, minlength=len(law)) for mine in tokens])


LAW, OTHER = [0.4, 0.3, 0.2, 0.1, 0.0], [0.5, 0.2, 0.2, 0.1, 0.0]


def test_equal_laws_are_not_flagged_and_p_values_are_uniform():
    p = np.sort([paired.histograms(counts(f"a {n}", 20, LAW), counts(f"b {n}", 20, LAW)).p for n in range(40)])
    assert np.abs(p - (np.arange(40) + 0.5) / 40).max() < 0.24  # Kolmogorov's bound at a level of 0.02


def test_another_law_is_flagged():
    found = paired.histograms(counts("a", 100, LAW), counts("b", 100, OTHER))
    assert found.p < 1e-3
    assert found.distance == pytest.approx(0.1, abs=0.03)
    assert found.noise < 0.04


def test_p_value_equals_that_of_all_assignments():
    one, other = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0]), np.array([2.0, 7.0, 1.0, 1.5, 2.0, 6.0])
    all_means = [abs(np.mean(np.array(signs) * (one - other))) for signs in itertools.product((1, -1), repeat=6)]
    found = paired.means(one, other)
    assert found.p == pytest.approx(np.mean(np.array(all_means) >= found.distance - 1e-12), abs=0.04)


def test_equal_samples_have_the_p_value_one():
    same = counts("a", 10, LAW)
    assert paired.histograms(same, same) == paired.SwapTest(0.0, 0.0, 1.0)


def test_the_observed_assignment_counts():
    """None of the 2,000 random assignments gives all 60 pairs one sign, so p is 1 of 2,001 and never 0."""
    assert paired.means(np.ones(60), np.zeros(60)).p == pytest.approx(1.0 / 2001.0)


def test_rare_cells_are_one_cell():
    """Cells with fewer than five expected counts in each sample are joined, so that two that differ there alone are equal."""
    one, other = np.array([[20, 20, 1, 0]] * 2), np.array([[20, 20, 0, 1]] * 2)
    assert paired.histograms(one, other).distance == 0.0
    assert paired.histograms(10 * one, 10 * other).distance > 0.0
