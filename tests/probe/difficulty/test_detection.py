"""AUROC equals Mann-Whitney's statistic; resamples are of whole problems; differences are paired."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.probe.difficulty.detection import Cases, roc
from dflash_mcmc.statistics.intervals import Clusters


def random_cases(seed: int, size: int = 60, problems: int = 17, ties: int = 9) -> tuple[Cases, np.ndarray, np.ndarray]:
    """Cases, an informative score and an uninformative one, both with ties."""
    numbers = np.random.default_rng(seed)
    wrong = numbers.random(size) < 0.4
    scores = numbers.integers(0, ties, size) + 2.0 * wrong
    return Cases([f"p{n}" for n in numbers.integers(0, problems, size)], wrong, []), scores, numbers.integers(0, 3, size) * 1.0


def by_pairs(wrong: np.ndarray, scores: np.ndarray, weights: np.ndarray, same=lambda i, j: True) -> float:
    """Weighted AUROC, pair by pair."""
    total = won = 0.0
    for i, j in itertools.product(np.flatnonzero(wrong), np.flatnonzero(~wrong)):
        if same(i, j):
            total += weights[i] * weights[j]
            won += weights[i] * weights[j] * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return won / total if total else np.nan


def test_by_hand():
    cases = Cases("abcd", [True, False, True, False], [])
    assert cases.auroc(cases.pairs(np.array([3.0, 1.0, 1.0, 2.0]))).value == 0.625  # pairs: 1, 1, 0 and 1/2, of 4
    assert cases.auroc(cases.pairs(np.array([4.0, 1.0, 3.0, 2.0]))).value == 1.0
    assert cases.auroc(cases.pairs(np.zeros(4))).value == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_auroc_equals_mann_whitney(seed):
    cases, scores, _ = random_cases(seed)
    statistic = stats.mannwhitneyu(scores[cases.wrong], scores[~cases.wrong]).statistic
    found = cases.auroc(cases.pairs(scores))
    assert found.value == pytest.approx(statistic / (cases.wrong.sum() * (~cases.wrong).sum()), abs=1e-12)
    assert found.n == cases.size


def test_intervals_equal_those_of_weighted_cases():
    """For a signal and for a difference, equal to `Clusters.statistic` with weights of single cases."""
    cases, scores, other = random_cases(1, size=25, problems=9)
    by_case = Clusters(cases.problems)
    single = by_case.statistic(lambda weights: np.array([by_pairs(cases.wrong, scores, row) for row in weights]))
    assert cases.auroc(cases.pairs(scores)) == pytest.approx(single)
    paired = by_case.statistic(lambda weights: np.array([by_pairs(cases.wrong, scores, row)
                                                         - by_pairs(cases.wrong, other, row) for row in weights]))
    assert cases.auroc(cases.pairs(scores) - cases.pairs(other)) == pytest.approx(paired)
    assert cases.mean(scores) == pytest.approx(by_case.mean(scores))


def test_problems_are_resampled_not_cases():
    """Copies of a problem's cases add no information."""
    cases, scores, _ = random_cases(2, problems=60)
    single, copied = (Cases(list(np.repeat(cases.problems, times)), np.repeat(cases.wrong, times), []) for times in (1, 8))
    one, many = (of.auroc(of.pairs(np.repeat(scores, times))) for of, times in ((single, 1), (copied, 8)))
    assert many[:3] == pytest.approx(one[:3])
    taken_apart = Cases(range(copied.size), copied.wrong, [])
    narrow = taken_apart.auroc(taken_apart.pairs(np.repeat(scores, 8)))
    assert narrow.high - narrow.low < 0.5 * (many.high - many.low)


def test_only_pairs_within_groups_count():
    cases, scores, _ = random_cases(3)
    group = np.arange(cases.num_problems) % 4
    of_case = group[cases.place]
    expected = by_pairs(cases.wrong, scores, np.ones(cases.size), lambda i, j: of_case[i] == of_case[j])
    assert cases.auroc(cases.pairs(scores), group).value == pytest.approx(expected, abs=1e-12)
    assert expected != pytest.approx(cases.auroc(cases.pairs(scores)).value, abs=1e-4)


@pytest.mark.parametrize("wrong", [[True] * 3, [False] * 3])
def test_no_auroc_if_all_cases_have_one_label(wrong):
    cases = Cases("abc", wrong, [])
    assert not cases.decided
    assert cases.auroc(cases.pairs(np.arange(3.0)))[:3] == (None, None, None)


def test_the_area_under_the_curve_is_auroc():
    cases, scores, _ = random_cases(4)
    right, wrong = roc(cases.wrong, scores)
    assert (right[0], wrong[0], right[-1], wrong[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert len(right) == len(set(scores)) + 1
    assert np.trapezoid(wrong, right) == pytest.approx(cases.auroc(cases.pairs(scores)).value, abs=1e-12)
