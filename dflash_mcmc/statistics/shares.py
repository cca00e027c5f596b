"""Shares of correct samples with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_mcmc.statistics.intervals import CONFIDENCE, Clusters, IntervalEstimate
from dflash_mcmc.statistics.outcomes import PairedOutcomes, outcomes


def wilson(correct: int, total: int) -> IntervalEstimate:
    """A share of independent samples with its score interval (Wilson 1927). None of `total` = 0."""
    from scipy import stats

    if not total:
        return IntervalEstimate(None, None, None, 0)
    interval = stats.binomtest(correct, total).proportion_ci(CONFIDENCE, method="wilson")
    return IntervalEstimate(correct / total, float(interval.low), float(interval.high), total)


def accuracy(records: Sequence[dict]) -> IntervalEstimate:
    """Share of correct samples, n of them: see `accuracy_of`."""
    return accuracy_of(outcomes(records))


def accuracy_of(of: PairedOutcomes) -> IntervalEstimate:
    """Share of correct samples: Wilson's interval with one chain a problem, else a bootstrap over problems.

    Samples of one problem are not independent, so problems are what is drawn anew (Miller 2024, arXiv 2411.00640). Chains of
    a single problem say nothing about others: the interval is all of [0, 1].
    """
    if of.single:
        return wilson(round(of.correct.sum()), len(of.problems))
    order = np.argsort(of.problems)  # the interval does not hang on the order of the records
    return _over_problems(of.correct[order], of.chains[order])


def mean_share(shares: Sequence[float]) -> IntervalEstimate:
    """Mean of one share in [0, 1] a problem, n problems, with the bootstrap over problems."""
    return _over_problems(np.asarray(shares, np.float64), np.ones(len(shares), np.int64))


def _over_problems(shares: np.ndarray, weights: np.ndarray) -> IntervalEstimate:
    if not len(shares):
        return IntervalEstimate(None, None, None, 0)
    value, samples = float((shares * weights).sum() / weights.sum()), int(weights.sum())
    if len(shares) == 1:
        return IntervalEstimate(value, 0.0, 1.0, samples)
    if np.ptp(shares) < 1e-12:  # nothing varies that could be drawn anew: the problems are what counts
        from statsmodels.stats.proportion import proportion_confint

        low, high = proportion_confint(value * len(shares), len(shares), 1.0 - CONFIDENCE, "wilson")
        return IntervalEstimate(value, float(low), float(high), samples)
    return Clusters(range(len(shares))).ratio(shares * weights, weights)
