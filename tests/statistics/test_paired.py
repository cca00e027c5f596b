"""Paired comparisons against published values, enumeration and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.errors import UserError
from dflash_mcmc.statistics.outcomes import PairedOutcomes, wilson
from dflash_mcmc.statistics.paired import (
    compare,
    detectable,
    detectable_by_spread,
    holm,
    mean_difference,
    power_of,
    problems_by_spread,
    problems_needed,
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


# The interaction of two switches: its value by hand, and its interval clustered by problem.

def test_effect_is_the_difference_of_differences():
    found = two_by_two(of([1, 0, 0, 0]), of([1, 1, 0, 0]), of([0, 0, 0, 0]), of([1, 1, 1, 0]))
    assert found.effect.value == pytest.approx((3 - 0) / 4 - (2 - 1) / 4)
    assert found.effect.n == 4
    assert found.cells == {"00": wilson(1, 4), "01": wilson(2, 4), "10": wilson(0, 4), "11": wilson(3, 4)}


def test_switches_that_add_up_do_not_interact():
    """The blend solves one more problem with either sampler."""
    found = two_by_two(of([1, 0, 0, 0]), of([1, 1, 0, 0]), of([1, 0, 1, 0]), of([1, 1, 1, 0]))
    assert found.effect.value == 0.0
    assert found.effect.low < 0.0 < found.effect.high


def test_the_interval_covers():
    """The interval covers in 400 experiments of 104 problems; problems with equal results in all four runs do not widen it."""
    rng, covered, widths = np.random.default_rng(3), 0, []
    for _ in range(400):
        ability = rng.normal(0.6, 1.0, 104)
        cells = [of(ability + effect + rng.normal(0, 0.3, 104) > 0) for effect in (0.0, 0.1, -0.1, 0.4)]
        effect = two_by_two(*cells).effect
        truth = _accuracy(0.4) - _accuracy(-0.1) - _accuracy(0.1) + _accuracy(0.0)
        covered += effect.low <= truth <= effect.high
        widths.append(effect.high - effect.low)
    assert 0.92 <= covered / 400 <= 0.98
    assert np.mean(widths) < 2 * 1.96 * np.sqrt(4 * 0.2 / 104) * 0.75  # width for four independent runs of 104 problems each


def _accuracy(effect: float) -> float:
    from scipy.stats import norm

    return float(norm.cdf((0.6 + effect) / np.hypot(1.0, 0.3)))


def test_other_problems_are_refused():
    runs = [of([1, 0])] * 3
    with pytest.raises(ValueError, match="not on the same problems"):
        two_by_two(*runs, of([1, 0, 1]))
    with pytest.raises(ValueError, match="no problem in common"):
        two_by_two(*[of([])] * 4)


def test_an_effect_can_be_as_large_as_two():
    one, none = of([1] * 6), of([0] * 6)
    found = two_by_two(one, none, none, one).effect
    assert (found.value, found.high) == (2.0, 2.0)
    assert found.low < 1.0


def test_the_interval_is_that_of_the_run_with_the_fewest_chains():
    few, many = of([1, 0, 0, 1]), of([0.5, 0.25, 0.75, 0.5], chains=100)
    difference = (many.correct - many.correct) - (many.correct - few.correct)
    assert two_by_two(few, many, many, many).effect == mean_difference(difference, 1, widest=2.0)


# Power analysis: compared with simulated exact McNemar tests, and with the asymptotic formula.

def connor(difference: float, discordant: float, power: float = 0.8, level: float = 0.05) -> float:
    """Sample size for the asymptotic test (Connor 1987, equation 3)."""
    z_level, z_power = stats.norm.ppf([1 - level / 2, power])
    return (z_level * np.sqrt(discordant) + z_power * np.sqrt(discordant - difference**2)) ** 2 / difference**2


@pytest.mark.parametrize(("problems", "difference", "discordant", "level"), [
    (104, 6 / 104, 8 / 104, 0.05), (500, 0.03, 0.08, 0.05), (40, 0.2, 0.3, 0.05), (200, 0.1, 0.3, 0.01), (30, 0.1, 0.1, 0.05)])
def test_power_is_that_of_simulated_experiments(problems, difference, discordant, level):
    rng = np.random.default_rng(0)
    better, worse = (discordant + difference) / 2, (discordant - difference) / 2
    counts = rng.multinomial(problems, [better, worse, 1 - discordant], 20_000)
    p_values = 2 * stats.binom.cdf(counts[:, :2].min(axis=1), counts[:, :2].sum(axis=1), 0.5)
    simulated = np.mean(p_values <= level)
    assert power_of(problems, difference, discordant, level) == pytest.approx(simulated, abs=4 * 0.5 / np.sqrt(20_000))


@pytest.mark.parametrize(("difference", "discordant"), [(0.03, 0.08), (0.03, 0.2), (0.1, 0.3), (6 / 104, 8 / 104)])
def test_problems_needed_are_the_fewest_and_somewhat_more_than_the_formula_says(difference, discordant):
    needed = problems_needed(difference, discordant)
    assert power_of(needed, difference, discordant) >= 0.8 > power_of(needed - 1, difference, discordant)
    assert 1.0 < needed / connor(difference, discordant) < 1.3


def test_the_formula_is_right_for_many_problems():
    assert problems_needed(0.01, 0.2) == pytest.approx(connor(0.01, 0.2), rel=0.03)


def test_three_points_take_hundreds_of_problems():
    """With the document's discordance, 8 of 104, all of MATH-500 is too small."""
    assert problems_needed(0.03, 8 / 104) == 708
    assert detectable(500, 8 / 104) > 0.03


def test_detectable_is_the_inverse():
    for problems in (104, 500, 2000):
        difference = detectable(problems, 0.15)
        assert power_of(problems, difference, 0.15) >= 0.8 > power_of(problems, difference - 2e-6, 0.15)
    assert problems_needed(detectable(500, 0.15), 0.15) <= 500


def test_too_few_discordant_problems_detect_nothing():
    """Five one-sided problems give p = 0.0625, so about five expected ones cannot give 80 % power."""
    assert detectable(100, 0.05) is None
    assert power_of(5, 0.9, 0.9) == 0.0


@pytest.mark.parametrize(("arguments", "message"), [
    ({"difference": 0.0}, "difference: given 0"), ({"difference": -0.1}, "difference: given -0.1"),
    ({"difference": float("nan")}, "difference: given nan"),
    ({"difference": 1e-5, "discordant": 0.9}, "difference: given 1e-05"),
    ({"discordant": 0.02}, "discordant: given 0.02; allowed: a number >= 0.03"),
    ({"discordant": 1.2}, "discordant: given 1.2"), ({"power": 1.0}, "power: given 1"), ({"power": 0.01}, "power: given 0.01"),
    ({"level": 0.0}, "level: given 0"),
])
def test_impossible_values_are_one_line_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        problems_needed(**{"difference": 0.03, "discordant": 0.1, **arguments})


def test_no_problems_have_no_power():
    with pytest.raises(UserError, match="problems: given 0"):
        power_of(0, 0.1, 0.2)


def test_problems_needed_with_several_chains_depend_on_the_spread():
    """Ten times the chains give a tenth of the variance and of the problems; compared with simulated experiments."""
    needed, spread = problems_by_spread(0.03, 0.3), 0.3
    assert needed == pytest.approx(((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * spread / 0.03) ** 2, rel=0.01)
    assert needed / problems_by_spread(0.03, spread / np.sqrt(10)) == pytest.approx(10, rel=0.1)
    drawn = np.random.default_rng(0).normal(0.03, spread, (4_000, needed))
    assert np.mean(stats.ttest_1samp(drawn, 0.0, axis=1).pvalue <= 0.05) == pytest.approx(0.8, abs=4 * 0.4 / np.sqrt(4_000))
    assert detectable_by_spread(needed, spread) == pytest.approx(0.03, rel=0.01)
    assert detectable_by_spread(1, spread) is detectable_by_spread(3, 1.0) is None


def test_impossible_spreads_are_one_line_errors():
    with pytest.raises(UserError, match="spread: given 0"):
        problems_by_spread(0.03, 0.0)
    with pytest.raises(UserError, match="difference: given 1e-05; allowed: one that fewer than"):
        problems_by_spread(1e-5, 1.0)
