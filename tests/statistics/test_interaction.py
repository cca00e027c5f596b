"""The interaction of two switches: its value by hand, and its interval clustered by problem."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mcmc.statistics.outcomes import PairedOutcomes, wilson
from dflash_mcmc.statistics.paired import mean_difference, two_by_two


def of(correct, chains: int = 1) -> PairedOutcomes:
    correct = np.asarray(correct, np.float64)
    return PairedOutcomes(tuple(map(str, range(len(correct)))), correct, np.full(len(correct), chains))


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
