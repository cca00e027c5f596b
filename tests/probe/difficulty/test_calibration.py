"""Logistic regression compared with scipy's optimiser, predictions from other problems alone, scores by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import optimize, stats

from dflash_mcmc.probe.difficulty import detection, tables
from dflash_mcmc.probe.difficulty.detection import Cases, Signal


def drawn(seed: int, size: int = 400, slope: float = 1.5) -> tuple[Cases, np.ndarray]:
    """Cases that are wrong with probability 1 / (1 + exp(-slope · x)), two per problem, and x."""
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=size)
    return Cases([f"p{n // 2}" for n in range(size)], numbers.random(size) < 1.0 / (1.0 + np.exp(-slope * x)), []), x


@pytest.mark.parametrize("columns", [1, 2])
def test_the_fit_equals_the_optimisers(columns):
    numbers = np.random.default_rng(columns)
    features = numbers.normal(size=(80, columns))
    labels = (numbers.random(80) < 0.3 + 0.4 * (features[:, 0] > 0)).astype(float)

    def loss(coefficients):
        score = coefficients[0] + features @ coefficients[1:]
        return np.logaddexp(0.0, score).sum() - labels @ score + 0.5e-3 * (coefficients @ coefficients)

    expected = optimize.minimize(loss, np.zeros(columns + 1), method="BFGS", options={"gtol": 1e-9}).x
    assert detection.fit(features, labels) == pytest.approx(expected, abs=1e-5)


def test_the_fit_is_finite_if_the_signal_separates_all_cases():
    x = np.linspace(-1.0, 1.0, 20)[:, None]
    separated, one_kind = detection.fit(x, (x[:, 0] > 0).astype(float)), detection.fit(x, np.zeros(20))
    assert np.isfinite([*separated, *one_kind]).all()
    assert separated[1] > 5
    assert one_kind[0] < -5


def test_a_prediction_does_not_use_its_own_problem():
    cases, x = drawn(0, 60)
    fold_of = detection.folds(cases.names, 5)
    before = detection.predict(cases, [x], fold_of)
    held = fold_of[cases.place] == 2
    cases.wrong = np.where(held, ~cases.wrong, cases.wrong)
    after = detection.predict(cases, [x], fold_of)
    assert np.array_equal(after.chance[held], before.chance[held])
    assert np.array_equal(after.base[held], before.base[held])
    assert (after.chance[~held] != before.chance[~held]).all()


def test_folds_are_equally_large_and_random():
    problems = [f"arith-{number:03d}" for number in range(300)]
    found = detection.folds(problems, 5)
    assert np.bincount(found).tolist() == [60] * 5
    levels = np.arange(300) % 5
    assert stats.chi2_contingency(np.histogram2d(found, levels, bins=5)[0]).pvalue > 0.01, "levels come in turn"
    shuffled = np.random.default_rng(0).permutation(300)
    assert np.array_equal(detection.folds([problems[n] for n in shuffled], 5), found[shuffled])
    assert np.array_equal(detection.folds(["a", "b"], 5), detection.folds(["a", "b"], 2))


def test_scores_by_hand():
    cases = Cases("abcd", [True, False, True, False], [])
    predictions = detection.Predictions(np.array([0.9, 0.2, 0.6, 0.3]), np.full(4, 0.5))
    found = detection.score(cases, predictions, 2)
    assert found.brier.value == pytest.approx((0.01 + 0.04 + 0.16 + 0.09) / 4)
    assert found.skill.value == pytest.approx(1 - 0.075 / 0.25)
    assert found.skill.low < found.skill.value < found.skill.high
    assert found.calibration_error == pytest.approx((abs(-0.5) + abs(2 - 1.5)) / 4)  # bins with sums 0.2, 0.3 and 0.6, 0.9
    of = SimpleNamespace(name="answers", cases=cases, num_bins=2)
    rows = tables.RELIABILITY.rows(tables.bins_of(of, Signal("kl", "draft", None, np.zeros(4)), predictions))
    assert [(row["bin"], row["predicted"], row["observed"], row["wrong"], row["n"]) for row in rows] == [
        (1, pytest.approx(0.25), 0.0, 0, 2), (2, pytest.approx(0.75), 1.0, 2, 2)]


def test_true_probabilities_are_calibrated_and_others_are_not():
    cases, x = drawn(1, 4000)
    exact = 1.0 / (1.0 + np.exp(-1.5 * x))
    base = np.full(cases.size, cases.wrong.mean())
    right, bold = (detection.score(cases, detection.Predictions(chance, base), 10)
                   for chance in (exact, 1.0 / (1.0 + np.exp(-4.0 * x))))
    assert right.calibration_error < 1.7 * right.error_by_chance
    assert bold.calibration_error > 5 * bold.error_by_chance
    fitted = detection.score(cases, detection.predict(cases, [x], detection.folds(cases.names, 5)), 10)
    assert fitted.brier.value == pytest.approx(right.brier.value, abs=2e-3)
    assert right.skill.low > 0.2


def test_the_error_by_chance_equals_that_of_simulated_outcomes():
    numbers = np.random.default_rng(2)
    chance = numbers.random(500)
    predictions = detection.Predictions(chance, np.full(500, 0.5))
    simulated = [detection.score(Cases(range(500), numbers.random(500) < chance, []), predictions, 10).calibration_error
                 for _ in range(25)]
    found = detection.score(Cases(range(500), numbers.random(500) < chance, []), predictions, 10).error_by_chance
    assert np.mean(simulated) == pytest.approx(found, rel=0.15)


def test_equal_probabilities_share_a_bin():
    assert detection.bins(np.array([0.3, 0.1, 0.2, 0.4]), 2).tolist() == [1, 0, 0, 1]
    assert detection.bins(np.array([0.5, 0.5, 0.5, 0.9]), 4).tolist() == [0, 0, 0, 1]
    assert np.bincount(detection.bins(np.random.default_rng(0).random(100), 10)).tolist() == [10] * 10
