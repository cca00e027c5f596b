"""Shares equal published values and statsmodels; chains of a problem are not independent."""

from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from dflash_mcmc.statistics.outcomes import accuracy, mean_share, wilson


def records(counts: list[int], chains: int = 1) -> list[dict]:
    """Records with this number of correct chains for each problem."""
    return [{"problem": str(problem), "chain": chain, "verdict": "correct" if chain < correct else "wrong"}
            for problem, correct in enumerate(counts) for chain in range(chains)]


@pytest.mark.parametrize(("correct", "total", "low", "high"), [
    (74, 104, 0.618, 0.790),  # the guided-power-sampling document's greedy row
    (81, 104, 0.690, 0.848),
    (0, 10, 0.0, 0.278),
    (10, 10, 0.722, 1.0),
    (1, 2, 0.095, 0.905),
])
def test_wilson_interval(correct, total, low, high):
    share = accuracy(records([1] * correct + [0] * (total - correct)))
    assert (share.value, share.n) == (correct / total, total)
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-4)
    assert share == wilson(correct, total)


def test_wilson_equals_statsmodels():
    for total in (1, 7, 104, 5000):
        for correct in {0, 1, total // 3, total}:
            share = wilson(correct, total)
            assert (share.low, share.high) == pytest.approx(proportion_confint(correct, total, method="wilson"), abs=1e-12)


def test_no_samples_have_no_share():
    assert wilson(0, 0) == accuracy([]) == mean_share([]) == (None, None, None, 0)


def test_several_chains_of_a_problem_are_not_independent():
    """Ten problems with equal chains: the interval is that of ten samples, not of a hundred."""
    given = records([10, 0] * 5, chains=10)
    share = accuracy(given)
    assert (share.value, share.n) == (0.5, 100)
    assert share.high - share.low > 0.5
    assert share == accuracy(list(reversed(given)))


@pytest.mark.parametrize(("correct", "low", "high"), [(2, 0.722, 1.0), (0, 0.0, 0.278), (1, 0.237, 0.763)])
def test_equal_problems_still_have_an_interval(correct, low, high):
    share = accuracy(records([correct] * 10, chains=2))
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-4)


def test_one_problem_says_nothing_about_others():
    assert accuracy(records([2], chains=2))[1:3] == (0.0, 1.0)


def test_a_tied_vote_counts_its_share():
    votes = [{"problem": str(n), "verdict": "tied", "correct": share} for n, share in enumerate((0.5, 1.0, 0.0, 0.25))]
    assert accuracy(votes).value == pytest.approx(0.4375)


def test_unequal_chains_weigh_by_sample():
    """3 of 4 and 0 of 1 are 3 of 5."""
    given = [*records([3], chains=4), {"problem": "b", "chain": 0, "verdict": "wrong"}]
    assert accuracy(given).value == pytest.approx(0.6)


def test_the_bootstrap_over_problems_covers():
    """The true accuracy is in about 95 % of the intervals of 300 experiments of 40 problems with 4 chains.

    Wilson's interval of 160 samples would cover it in about 80 %, since problems differ.
    """
    rng, covered, pooled = np.random.default_rng(5), 0, 0
    for _ in range(300):
        counts = rng.binomial(4, rng.beta(1.0, 1.0, 40))  # true accuracy 1/2
        share, naive = accuracy(records(counts.tolist(), chains=4)), wilson(int(counts.sum()), 160)
        covered += share.low <= 0.5 <= share.high
        pooled += naive.low <= 0.5 <= naive.high
    assert 0.91 <= covered / 300 <= 0.98
    assert pooled / 300 < 0.88
