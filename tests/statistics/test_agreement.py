"""The permutation test of two runs: right level, power, and strata."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.statistics.paired import agreement


def drawn(generator, shift=0.0, problems=12, chains=4):
    """Values of problems that differ much more than a shift."""
    return {str(n): (10.0 * n + shift + generator.standard_normal(chains)).tolist() for n in range(problems)}


def test_one_problem_by_hand():
    """Two values against two: 2 of the 6 ways to share them differ as much as (1, 2) against (3, 4)."""
    found = agreement({"a": [1.0, 2.0]}, {"a": [3.0, 4.0], "b": [9.0]})
    assert (found.problems, found.samples_a, found.samples_b, found.difference) == (1, 2, 2, -2.0)
    assert found.p_value == pytest.approx(1 / 3, abs=0.02)


def test_equal_values_agree():
    assert agreement({"a": [1.0, 1.0]}, {"a": [1.0, 1.0]}).p_value == 1.0


def test_a_shift_within_problems_is_seen_although_problems_differ_more():
    generator = np.random.default_rng(1)
    assert agreement(drawn(generator), drawn(generator, 1.0)).p_value < 0.001


def test_equal_laws_are_rejected_at_the_stated_rate():
    generator = np.random.default_rng(2)
    p_values = [agreement(drawn(generator, problems=4, chains=3), drawn(generator, problems=4, chains=3)).p_value
                for _ in range(200)]
    assert 0.01 < np.mean(np.array(p_values) <= 0.05) < 0.1
    assert 0.4 < np.mean(p_values) < 0.6


def test_no_common_problem_gives_none():
    assert agreement({"a": [1.0]}, {"b": [1.0]}) is None


def test_the_smallest_p_value_counts_the_observed_labels():
    generator = np.random.default_rng(1)
    assert agreement(drawn(generator), drawn(generator, 100.0)).p_value == 1.0 / 10_000.0
