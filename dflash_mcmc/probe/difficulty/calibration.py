"""Probabilities of being wrong, predicted from signals, and their quality: Brier score, its skill, calibration.

The probability of a case comes from a logistic regression. It is fitted to the cases of other problems (cross-validation by
problem), so the fit has not seen the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.probe.difficulty.detection import Cases
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.intervals import IntervalEstimate

_RIDGE = 1e-3
"""Weight of the penalty on squared coefficients. It keeps them finite if a signal separates the cases or all labels agree."""
_MOST_STEPS = 50


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
        known, asked = ((features[part] - centre) / np.where(scale > 0, scale, 1.0) for part in (fitted, held))
        chance[held] = _sigmoid(_with_one(asked) @ fit(known, labels[fitted]))
        base[held] = labels[fitted].mean()
    return Predictions(chance, base)


def folds(problems: Sequence[str], num_folds: int) -> np.ndarray:
    """The fold of each problem, int64 (problems,). Folds are equally large and assigned in random order.

    The dataset's own order is not used, because consecutive problems may cycle through the levels.
    """
    order = np.argsort([Key(0).fold_in("fold", problem).uniform() for problem in problems], kind="stable")
    found = np.empty(len(problems), np.int64)
    found[order] = np.arange(len(problems)) % num_folds
    return found


def fit(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Coefficients of logistic regression, float64 (1 + features,), constant first, by Newton's method with step halving."""
    design = _with_one(features)
    found = np.zeros(design.shape[1])
    loss = _loss(design, labels, found)
    for _ in range(_MOST_STEPS):
        chance = _sigmoid(design @ found)
        gradient = design.T @ (chance - labels) + _RIDGE * found
        curvature = (design * (chance * (1.0 - chance))[:, None]).T @ design + _RIDGE * np.eye(len(found))
        step = np.linalg.solve(curvature, gradient)
        while (lower := _loss(design, labels, found - step)) > loss:
            step = step / 2.0
            if np.abs(step).max() < 1e-12:
                return found
        found, loss = found - step, lower
        if np.abs(step).max() < 1e-9:
            break
    return found


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


def reliability(cases: Cases, predictions: Predictions, num_bins: int) -> list[dict]:
    """One row per bin: mean probability, share of wrong cases, number of cases."""
    rows, bin_of = [], bins(predictions.chance, num_bins)
    for number in range(int(bin_of.max()) + 1):
        own = bin_of == number
        observed = cases.ratio(cases.wrong & own, own)
        rows.append({"bin": number + 1, "predicted": float(predictions.chance[own].mean()), **observed.columns("observed"),
                     "wrong": int(cases.wrong[own].sum()), "n": int(own.sum())})
    return rows


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
