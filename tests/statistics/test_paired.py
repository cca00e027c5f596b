"""Paired comparisons against published values, enumeration and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.statistics.outcomes import PairedOutcomes
from dflash_mcmc.statistics.paired import compare, holm, sign_flip, verdict


def of(correct, chains: int = 1) -> PairedOutcomes:
    correct = np.asarray(correct, np.float64)
    return PairedOutcomes(tuple(map(str, range(len(correct)))), correct, np.full(len(correct), chains))


def table(both: int, only_a: int, only_b: int, neither: int) -> tuple[PairedOutcomes, PairedOutcomes]:
    parts = (both, only_a, only_b, neither)
    return of(np.repeat([1, 1, 0, 0], parts)), of(np.repeat([1, 0, 1, 0], parts))


def test_the_document_s_seven_against_one():
    """77.9 and 72.1 %: exact McNemar p = 0.0703, a tie."""
    found = compare(*table(74, 7, 1, 22))
    assert (found.both, found.only_a, found.only_b, found.neither) == (74, 7, 1, 22)
    assert found.p_value == pytest.approx(0.0703125, abs=1e-12)
    assert found.test == "exact McNemar"
    assert found.verdict == "tie"
    assert found.difference.value == pytest.approx(6 / 104)
    assert found.difference.n == 104
    assert found.difference.low > 0.0  # the bootstrap excludes 0, but the verdict follows the exact test


@pytest.mark.parametrize(("a", "b", "p_value"), [(10, 0, 0.001953), (9, 1, 0.021484), (8, 2, 0.109375), (5, 5, 1.0),
                                                 (0, 0, 1.0)])
def test_mcnemar_is_the_binomial_test_of_discordant_problems(a, b, p_value):
    found = compare(*table(20, a, b, 20))
    assert found.p_value == pytest.approx(p_value, abs=1e-6)
    if a + b:
        assert found.p_value == pytest.approx(stats.binomtest(a, a + b).pvalue)


def test_verdicts():
    assert compare(*table(20, 10, 0, 20)).verdict == "a better"
    assert compare(*table(20, 0, 10, 20)).verdict == "b better"
    assert verdict(0.1, 0.04) == "a better"
    assert verdict(-0.1, 0.05) == "b better"
    assert verdict(0.1, 0.0501) == verdict(0.0, 0.01) == verdict(0.1, None) == "tie"


def test_swapping_the_runs_mirrors_everything():
    a, b = table(30, 9, 2, 11)
    there, back = compare(a, b), compare(b, a)
    assert (there.only_a, there.only_b, there.p_value) == (back.only_b, back.only_a, back.p_value)
    assert (back.difference.low, back.difference.high) == pytest.approx((-there.difference.high, -there.difference.low))


def test_several_chains_are_expected_numbers_of_pairs():
    found = compare(of([1.0, 0.5, 0.25], 4), of([0.5, 0.5, 0.0], 4))
    assert (found.both, found.only_a, found.only_b, found.neither) == (0.75, 1.0, 0.25, 1.0)
    assert found.test == "paired permutation"
    assert found.difference.value == pytest.approx(0.25)


@pytest.mark.parametrize("seed", range(4))
def test_permutation_p_value_is_that_of_all_sign_flips(seed):
    """Differences of thirds and quarters, with ties among the sums of flips."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 5, 12) / 4, rng.integers(0, 4, 12) / 3
    differences = a - b
    sums = [np.dot(signs, differences) for signs in itertools.product((-1, 1), repeat=12)]
    enumerated = np.mean(np.abs(sums) >= abs(differences.sum()) - 1e-9)
    assert compare(of(a, 4), of(b, 3)).p_value == pytest.approx(enumerated, abs=1e-12)


def test_permutation_of_single_chains_is_mcnemar():
    """With one chain per problem, the sign-flip test equals the binomial test of discordant problems."""
    a, b = table(30, 9, 2, 11)
    assert sign_flip(a.correct - b.correct) == pytest.approx(compare(a, b).p_value, abs=1e-12)


def test_flips_of_many_differing_problems_use_a_fixed_seed():
    differences = np.random.default_rng(1).normal(0.15, 0.5, 60)
    assert sign_flip(differences) == sign_flip(differences)
    assert sign_flip(differences) == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue, abs=0.01)


def test_nothing_differs():
    found = compare(*table(60, 0, 0, 44))
    assert (found.p_value, found.verdict, found.difference.value) == (1.0, "tie", 0.0)
    upper = stats.binomtest(0, 104).proportion_ci(method="exact").high  # of the share of problems that differ
    assert (found.difference.low, found.difference.high) == pytest.approx((-upper, upper))
    assert sign_flip([0.0, 0.5, 0.0]) == 1.0


def test_runs_on_other_problems_are_refused():
    a, b = table(3, 1, 1, 2)
    with pytest.raises(ValueError, match="not on the same problems"):
        compare(a, b._replace(problems=b.problems[::-1]))
    with pytest.raises(ValueError, match="no problem in common"):
        compare(of([]), of([]))


def test_holm_by_hand():
    """0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1, never decreasing; a row without a test does not count."""
    assert holm([0.04, None, 0.01, 0.03, 0.02]) == [pytest.approx(0.06), None, pytest.approx(0.04), pytest.approx(0.06),
                                                    pytest.approx(0.06)]
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([None]) == [None]
    assert holm([]) == []


def test_the_paired_bootstrap_covers():
    """The interval covers 5 points in about 95 % of 400 experiments of 104 problems with 15 % discordant."""
    rng, covered = np.random.default_rng(11), 0
    for _ in range(400):
        counts = rng.multinomial(104, [0.60, 0.10, 0.05, 0.25])
        difference = compare(*table(*counts)).difference
        covered += difference.low <= 0.05 <= difference.high
    assert 0.92 <= covered / 400 <= 0.98


def test_difficulty_is_not_noise():
    """The paired interval is narrower than the interval of two accuracies over different problems."""
    difference = compare(*table(74, 7, 1, 22)).difference
    unpaired = 2 * 1.96 * np.sqrt((81 * 23 + 75 * 29) / 104**3)
    assert difference.high - difference.low < unpaired / 2
