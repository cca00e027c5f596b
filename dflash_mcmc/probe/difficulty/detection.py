"""AUROC of signals that separate wrong answers or steps from right ones, and its differences, clustered by problem.

AUROC is the probability that a wrong case has a larger signal than a right one, where ties count half. It equals
Mann-Whitney's U divided by the number of pairs (Hanley & McNeil 1982). Signals are never reversed. An AUROC below 0.5 means
that the signal is smaller for wrong cases.

Probabilities of being wrong are predicted from signals by logistic regression. It is fitted to the cases of other problems
(cross-validation by problem), so that the fit has not seen the case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: signals that need the draft, signals of the target alone, and signals that need neither."""

_RIDGE = 1e-3
"""Weight of the penalty on squared coefficients. It keeps them finite if a signal separates the cases or all labels agree."""
_MOST_STEPS = 50


class Signal(NamedTuple):
    """A value per case that may predict whether the case is wrong."""

    name: str
    kind: str
    statistic: str | None
    """`mean` or `max` over the case's tokens; None for signals that are not computed from tokens."""
    values: np.ndarray
    """float64 (cases,)."""

    @property
    def label(self) -> str:
        """Name and statistic."""
        return self.name if self.statistic is None else f"{self.name} {self.statistic}"


class Cases:
    """Answers or steps, right or wrong, grouped by problem.

    Args:
        problems: the problem of each case.
        wrong: whether each case is wrong.
        signals: signals of all cases.
    """

    def __init__(self, problems: Sequence[str], wrong: Sequence[bool], signals: Sequence[Signal]):
        self.problems, self.wrong, self.signals = list(problems), np.asarray(wrong, bool), list(signals)
        self.names = list(dict.fromkeys(self.problems))
        place = {name: number for number, name in enumerate(self.names)}
        self.place, self.num_problems = np.array([place[name] for name in self.problems], np.int64), len(self.names)
        # The bootstrap resamples problems, and all statistics need only sums over a problem's cases. Each problem is
        # therefore one observation.
        self._clusters = Clusters(self.names)

    @property
    def size(self) -> int:
        """Number of cases."""
        return len(self.wrong)

    @property
    def decided(self) -> bool:
        """Whether there are both wrong and right cases; otherwise there is no AUROC."""
        return bool(self.wrong.any() and not self.wrong.all())

    def pairs(self, scores: np.ndarray) -> np.ndarray:
        """The number of pairs in which the wrong case has the larger score, float64 (problems, problems).

        The wrong case is from the first problem, the right case from the second one. Ties count half. The sum over all
        problems is Mann-Whitney's U.
        """
        wrong, right = np.flatnonzero(self.wrong), np.flatnonzero(~self.wrong)
        order = right[np.argsort(scores[right], kind="stable")]
        upto = np.zeros((len(right) + 1, self.num_problems))  # number of right cases of each problem among the first n
        upto[np.arange(1, len(right) + 1), self.place[order]] = 1.0
        upto = upto.cumsum(axis=0)
        below, not_above = (np.searchsorted(scores[order], scores[wrong], side=side) for side in ("left", "right"))
        pairs = np.zeros((self.num_problems, self.num_problems))
        np.add.at(pairs, self.place[wrong], 0.5 * (upto[below] + upto[not_above]))
        return pairs

    def auroc(self, pairs: np.ndarray, group: np.ndarray | None = None) -> IntervalEstimate:
        """The AUROC from a signal's pairs. The difference of two signals' pairs gives the paired difference of their AUROCs.

        Args:
            group: int64 (problems,); only pairs within a group count. None means all pairs.
        """
        group = np.zeros(self.num_problems, np.int64) if group is None else group
        pairs, member = pairs * (group[:, None] == group), np.eye(group.max() + 1)[group]
        wrong, right = (self.sums(kind)[:, None] * member for kind in (self.wrong, ~self.wrong))

        def of(counts: np.ndarray) -> np.ndarray:
            return _divided(((counts @ pairs) * counts).sum(axis=1), ((counts @ wrong) * (counts @ right)).sum(axis=1))

        return self.statistic(of)

    def mean(self, values: np.ndarray) -> IntervalEstimate:
        """Mean over the cases."""
        return self.ratio(values, np.ones(self.size))

    def ratio(self, above: np.ndarray, below: np.ndarray) -> IntervalEstimate:
        """The sum of `above` over the cases divided by the sum of `below`."""
        return self._clusters.ratio(self.sums(above), self.sums(below))._replace(n=self.size)

    def statistic(self, function: Callable[[np.ndarray], np.ndarray]) -> IntervalEstimate:
        """Any other statistic: function(counts (resamples, problems)) -> (resamples,), with nan if it is undefined."""
        return self._clusters.statistic(function)._replace(n=self.size)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each problem's cases, float64 (problems,)."""
        return np.bincount(self.place, values, self.num_problems)


def roc(wrong: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of right and of wrong cases at or above each threshold, from none to all. The curve's area is the AUROC."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(wrong[order])[ends]
    return (np.append(0.0, (ends + 1 - hits) / (~wrong).sum()), np.append(0.0, hits / wrong.sum()))


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)


class Predictions(NamedTuple):
    """Predicted probabilities that cases are wrong. Each array is float64 (cases,) and uses only cases of other problems."""

    chance: np.ndarray
    base: np.ndarray
    """For each case, the share of wrong cases among the cases of its fit."""


class Scores(NamedTuple):
    """Scores of predictions."""

    brier: IntervalEstimate
    """Mean squared difference of predicted probability and outcome (Brier 1950)."""
    skill: IntervalEstimate
    """1 - Brier score / Brier score of the base rate: the information that the signal adds to the share of wrong cases."""
    calibration_error: float | None
    """Expected calibration error: mean of |observed share - mean probability| over bins of equally many cases.

    It has no interval, because resampling adds noise to a quantity that is never negative. Compare it with
    `error_by_chance`.
    """
    error_by_chance: float | None
    """Approximate calibration error of perfectly calibrated probabilities: sqrt(2/pi) standard deviations in each bin."""


def predict(cases: Cases, signals: Sequence[np.ndarray], fold_of: np.ndarray) -> Predictions:
    """Predictions from one or several signals, each float64 (cases,). The signals are standardised first.

    Args:
        fold_of: the result of `folds`, for at least two problems.
    """
    features, labels, fold = np.stack(signals, axis=1), cases.wrong.astype(np.float64), fold_of[cases.place]
    chance, base = np.empty(cases.size), np.empty(cases.size)
    for number in np.unique(fold):
        held, fitted = fold == number, fold != number
        centre, scale = features[fitted].mean(axis=0), features[fitted].std(axis=0)
        known, unseen = ((features[part] - centre) / np.where(scale > 0, scale, 1.0) for part in (fitted, held))
        chance[held] = _sigmoid(_with_one(unseen) @ fit(known, labels[fitted]))
        base[held] = labels[fitted].mean()
    return Predictions(chance, base)


def folds(problems: Sequence[str], num_folds: int) -> np.ndarray:
    """The fold of each problem, int64 (problems,). Folds are equally large and assigned in random order.

    The dataset's own order is not used, because consecutive problems may cycle through the levels.
    """
    order = np.argsort([Key(0).fold_in("fold", problem).uniform() for problem in problems], kind="stable")
    fold = np.empty(len(problems), np.int64)
    fold[order] = np.arange(len(problems)) % num_folds
    return fold


def fit(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Coefficients of logistic regression, float64 (1 + features,), constant first, by Newton's method with step halving."""
    design = _with_one(features)
    coefficients = np.zeros(design.shape[1])
    loss = _loss(design, labels, coefficients)
    for _ in range(_MOST_STEPS):
        chance = _sigmoid(design @ coefficients)
        gradient = design.T @ (chance - labels) + _RIDGE * coefficients
        curvature = (design * (chance * (1.0 - chance))[:, None]).T @ design + _RIDGE * np.eye(len(coefficients))
        step = np.linalg.solve(curvature, gradient)
        while (lower := _loss(design, labels, coefficients - step)) > loss:
            step = step / 2.0
            if np.abs(step).max() < 1e-12:
                return coefficients
        coefficients, loss = coefficients - step, lower
        if np.abs(step).max() < 1e-9:
            break
    return coefficients


def score(cases: Cases, predictions: Predictions, num_bins: int) -> Scores:
    """The scores of the predicted probabilities."""
    squared, of_base = ((chance - cases.wrong) ** 2 for chance in predictions)
    skill = cases.ratio(squared, of_base).mapped(lambda ratio: 1.0 - ratio)
    skill = skill._replace(low=skill.high, high=skill.low)  # the ends swap, because 1 - ratio decreases as the ratio increases
    bin_of = bins(predictions.chance, num_bins)
    gaps = np.bincount(bin_of, cases.wrong - predictions.chance)
    spread = np.bincount(bin_of, predictions.chance * (1.0 - predictions.chance))
    return Scores(cases.mean(squared), skill, float(np.abs(gaps).sum() / cases.size),
                  float(np.sqrt(2.0 / np.pi * spread).sum() / cases.size))


def bins(values: np.ndarray, num_bins: int) -> np.ndarray:
    """The bin of each value, int64. Bins are in order and equally large, except that equal values share a bin."""
    order = np.sort(values)
    first = np.searchsorted(order, values)
    return np.unique(first * num_bins // len(values), return_inverse=True)[1]


def _loss(design: np.ndarray, labels: np.ndarray, coefficients: np.ndarray) -> float:
    score = design @ coefficients
    return float((np.logaddexp(0.0, score) - labels * score).sum() + 0.5 * _RIDGE * (coefficients**2).sum())


def _sigmoid(score: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * score))


def _with_one(features: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(features)), features])
