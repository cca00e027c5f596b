"""Paired comparisons against published values, enumeration and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.statistics.outcomes import PairedOutcomes
from dflash_mcmc.statistics.paired import compare, holm, mean_difference, sign_flip, verdict


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
    assert found.difference.low < 0.0 < found.difference.high  # as the exact test says


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


def test_the_interval_is_bonett_and_price_s_with_student_s_quantile():
    """7 against 1 of 104 problems: 8 against 2 of 106."""
    found = compare(*table(74, 7, 1, 22)).difference
    spread = np.sqrt((10 / 106 - (6 / 106) ** 2) / 105)  # the standard error, with n - 1 in the variance
    half = stats.t(105).ppf(0.975) * spread
    assert (found.low, found.high) == pytest.approx((6 / 106 - half, 6 / 106 + half))


def coverage(number: int, only_a: float, only_b: float) -> float:
    """Probability that the interval of single chains covers the difference, by the sum over all tables of two runs."""
    found, rest = 0.0, max(0.0, 1.0 - only_a - only_b)
    for a, b in itertools.product(range(number + 1), repeat=2):
        if a + b > number:
            continue
        difference = mean_difference(np.repeat([1.0, -1.0, 0.0], (a, b, number - a - b)), 1)
        if difference.low - 1e-12 <= only_a - only_b <= difference.high + 1e-12:
            found += stats.multinomial.pmf((a, b, number - a - b), number, (only_a, only_b, rest))
    return found


@pytest.mark.parametrize(("only_a", "only_b"), [(0.3, 0.3), (0.1, 0.0), (0.35, 0.55)])
def test_the_interval_of_eight_problems_covers(only_a, only_b):
    assert coverage(8, only_a, only_b) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("number", "least"), [(8, 0.968), (20, 0.947), (104, 0.946)])
def test_the_interval_covers_whatever_the_shares_are(number, least):
    """A bootstrap over problems covers 87.5 % with 8 problems and 92.5 % with 20."""
    shares = np.linspace(0.0, 0.9, 19) if number < 100 else np.linspace(0.0, 0.9, 4)
    assert min(coverage(number, a, b) for a in shares for b in shares if a + b <= 1.0) >= least


@pytest.mark.slow
@pytest.mark.parametrize("number", [8, 20])
@pytest.mark.parametrize("chains", [2, 4, 16])
@pytest.mark.parametrize(("ability", "shift", "spread"), [(0.6, -0.2, 3.0), (0.95, -0.1, 0.5), (0.03, 0.05, 0.5)])
def test_the_interval_of_several_chains_covers(number, chains, ability, shift, spread):
    """Problems differ in difficulty, and the runs differ more on some than on others."""
    rng, experiments = np.random.default_rng(0), 2000

    def abilities(count: int) -> tuple[np.ndarray, np.ndarray]:
        own = rng.beta(ability * spread, (1.0 - ability) * spread, count)
        return np.clip(own + shift * rng.uniform(0.0, 2.0, count), 0.0, 1.0), own

    truth, covered = float(np.subtract(*abilities(1_000_000)).mean()), 0
    for _ in range(experiments):
        a, b = (rng.binomial(chains, own) / chains for own in abilities(number))
        difference = mean_difference(a - b, chains)
        covered += difference.low <= truth <= difference.high
    assert covered / experiments >= 0.945


def test_difficulty_is_not_noise():
    """The paired interval is narrower than the interval of two accuracies over different problems."""
    difference = compare(*table(74, 7, 1, 22)).difference
    unpaired = 2 * 1.96 * np.sqrt((81 * 23 + 75 * 29) / 104**3)
    assert difference.high - difference.low < unpaired / 2


def test_an_interval_has_nothing_that_is_impossible():
    assert mean_difference(np.array([-1.0, -1.0, -1.0, 0.0]), 1).low == -1.0
    assert mean_difference(np.array([1.0, 1.0, 1.0, 0.0]), 1).high == 1.0


def test_equal_differences_bound_the_share_of_other_problems():
    """With five equal differences at most 1 - 0.025^(1/5) of all problems differ, each by at most what is possible."""
    found, others = mean_difference(np.full(5, 0.5), 1), 1.0 - 0.025**0.2
    assert (found.low, found.high) == pytest.approx((0.5 - 1.5 * others, 0.5 + 0.5 * others))
