"""Power analysis: compared with simulated exact McNemar tests, and with the asymptotic formula."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.errors import UserError
from dflash_mcmc.statistics.paired import detectable, detectable_by_spread, power_of, problems_by_spread, problems_needed


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
