"""Paired comparisons against published values, enumeration and simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.statistics.estimates import PairedOutcomes, wilson
from dflash_mcmc.statistics.paired import (
    VarianceParts,
    compare,
    holm,
    mean_difference,
    sign_flip,
    two_by_two,
    verdict,
)


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


def test_verdicts():
    assert compare(*table(20, 10, 0, 20)).verdict == "a better"
    assert compare(*table(20, 0, 10, 20)).verdict == "b better"
    a, b = table(30, 9, 2, 11)
    there, back = compare(a, b), compare(b, a)
    assert sign_flip(a.correct - b.correct) == pytest.approx(there.p_value, abs=1e-12)  # of single chains it is McNemar's
    assert (there.only_a, there.only_b, there.p_value) == (back.only_b, back.only_a, back.p_value)
    assert (back.difference.low, back.difference.high) == pytest.approx((-there.difference.high, -there.difference.low))
    assert verdict(0.1, 0.04) == "a better"
    assert verdict(-0.1, 0.05) == "b better"
    assert verdict(0.1, 0.0501) == verdict(0.0, 0.01) == verdict(0.1, None) == "tie"


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


@pytest.mark.parametrize("function", [compare, lambda a, b: two_by_two(a, a, a, b)])
def test_runs_on_other_problems_are_refused(function):
    a, b = table(3, 1, 1, 2)
    for other in (b._replace(problems=b.problems[::-1]), of([1, 0, 1])):
        with pytest.raises(ValueError, match="not on the same problems"):
            function(a, other)
    with pytest.raises(ValueError, match="no problem in common"):
        function(of([]), of([]))


def test_holm_by_hand():
    """0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1, never decreasing; a row without a test does not count."""
    assert holm([0.04, None, 0.01, 0.03, 0.02]) == [pytest.approx(0.06), None, pytest.approx(0.04), pytest.approx(0.06),
                                                    pytest.approx(0.06)]
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([None]) == [None]
    assert holm([]) == []


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


SHARES = np.linspace(0.0, 0.9, 19)


@pytest.mark.parametrize(("number", "shares", "least"), [
    (8, [0.0, 0.1, 0.3, 0.55], 0.968),
    *(pytest.param(*each, marks=pytest.mark.slow)
      for each in [(8, SHARES, 0.968), (20, SHARES, 0.947), (104, SHARES[::6], 0.946)])])
def test_the_interval_covers_whatever_the_shares_are(number, shares, least):
    """A bootstrap over problems covers 87.5 % with 8 problems and 92.5 % with 20."""
    assert min(coverage(number, a, b) for a in shares for b in shares if a + b <= 1.0) >= least


def test_equal_differences_bound_the_share_of_other_problems():
    """With five equal differences at most 1 - 0.025^(1/5) of all problems differ, each by at most what is possible."""
    found, others = mean_difference(np.full(5, 0.5), 1), 1.0 - 0.025**0.2
    assert (found.low, found.high) == pytest.approx((0.5 - 1.5 * others, 0.5 + 0.5 * others))
    assert mean_difference(np.array([-1.0, -1.0, -1.0, 0.0]), 1).low == -1.0  # nothing is below what is possible
    assert mean_difference(np.array([1.0, 1.0, 1.0, 0.0]), 1).high == 1.0


# The interaction of two switches: its value by hand, and its interval, which is that of a mean difference.

def test_effect_is_the_difference_of_differences():
    found = two_by_two(of([1, 0, 0, 0]), of([1, 1, 0, 0]), of([0, 0, 0, 0]), of([1, 1, 1, 0]))
    assert found.effect.value == pytest.approx((3 - 0) / 4 - (2 - 1) / 4)
    assert found.effect.n == 4
    added = two_by_two(of([1, 0, 0, 0]), of([1, 1, 0, 0]), of([1, 0, 1, 0]), of([1, 1, 1, 0])).effect
    assert added.value == 0.0
    assert added.low < 0.0 < added.high
    one, none = of([1] * 6), of([0] * 6)
    assert two_by_two(one, none, none, one).effect[::2] == (2.0, 2.0)  # as large as an effect can be
    assert found.cells == {"00": wilson(1, 4), "01": wilson(2, 4), "10": wilson(0, 4), "11": wilson(3, 4)}


def test_the_interval_is_that_of_the_run_with_the_fewest_chains():
    few, many = of([1, 0, 0, 1]), of([0.5, 0.25, 0.75, 0.5], chains=100)
    difference = (many.correct - many.correct) - (many.correct - few.correct)
    assert two_by_two(few, many, many, many).effect == mean_difference(difference, 1, widest=2.0)


@pytest.mark.parametrize(("chains", "added"), [(1, 1.0), (4, 0.5), (25, 0.2)])
def test_the_interval_adds_two_values_of_the_size_of_a_problem_s_noise(chains, added):
    values = [0.5, -0.25, 0.0, 0.75, 0.25, -0.5]
    spread = stats.sem([*values, added, -added])
    low, high = stats.t.interval(0.95, len(values) + 1, np.mean([*values, added, -added]), spread)
    found = mean_difference(np.array(values), chains)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


# Power analysis: compared with simulated experiments.

@pytest.mark.parametrize(("problems", "chains", "between"), [(164, 1, 0.0), (164, 8, 0.0), (400, 4, 0.05), (150, 32, 0.05)])
def test_what_is_resolved_is_detected_in_four_of_five_simulated_experiments(problems, chains, between):
    """True shares of the two runs are 0.5 -+ half of a normal difference; the noise of a chain of each is 2 * 0.25 or less."""
    rng, mean = np.random.default_rng(0), 0.0

    def drawn(runs: int) -> tuple[np.ndarray, np.ndarray]:
        true = mean + np.sqrt(between) * rng.choice([-1.0, 1.0], (runs, problems))
        return tuple(rng.binomial(chains, 0.5 + side * true) / chains for side in (0.5, -0.5))

    exact = VarianceParts(between, 2 * 0.25 - between / 2)  # the mean of 2 (1/4 - t^2/4)
    mean = exact.resolved(problems, chains)
    a, b = drawn(4000)
    detected = np.mean(stats.ttest_rel(a, b, axis=1).pvalue <= 0.05)
    assert detected == pytest.approx(0.8, abs=0.03)
    if chains > 1:
        found = [VarianceParts.of(of(a[run], chains), of(b[run], chains)) for run in range(200)]
        assert np.mean([noise.chains for noise in found]) == pytest.approx(exact.chains - mean**2 / 2, rel=0.03)
        assert np.mean([noise.problems for noise in found]) == pytest.approx(between, abs=0.01)


def test_problems_and_chains_needed_are_the_fewest():
    noise = VarianceParts(0.02, 0.16)
    problems, chains = noise.problems_needed(0.03, 4), noise.chains_needed(0.03, 400)
    assert noise.resolved(problems, 4) <= 0.03 < noise.resolved(problems - 1, 4)
    assert noise.resolved(400, chains) <= 0.03 < noise.resolved(400, chains - 1)
    assert noise.chains_needed(0.03, 100) is None  # of infinitely many chains 0.02 / 100 is left
    assert VarianceParts(0.0, 1.0).resolved(2, 1) is None


def test_a_run_of_one_chain_has_no_noise_of_its_own():
    greedy, drawn = of([1, 0, 1, 0]), of([0.5, 0.5, 1.0, 0.0], chains=2)
    assert VarianceParts.of(drawn, greedy).chains == pytest.approx((0.25 + 0.25) / 4 * 2)
