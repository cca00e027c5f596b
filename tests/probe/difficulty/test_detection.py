"""AUROC equals Mann-Whitney's statistic; resamples are of whole problems; differences are paired."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.probe.difficulty import detection, signals, tables
from dflash_mcmc.probe.difficulty.detection import Cases, Signal, roc
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


# Logistic regression compared with scipy's optimiser, predictions from other problems alone, scores by hand.

def drawn(seed: int, size: int = 400, slope: float = 1.5) -> tuple[Cases, np.ndarray]:
    """Cases that are wrong with probability 1 / (1 + exp(-slope · x)), two per problem, and x."""
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=size)
    return Cases([f"p{n // 2}" for n in range(size)], numbers.random(size) < 1.0 / (1.0 + np.exp(-slope * x)), []), x


@pytest.mark.parametrize("columns", [1, 2])
def test_the_gradient_of_the_penalised_loss_is_0_at_the_fit(columns):
    numbers = np.random.default_rng(columns)
    features = numbers.normal(size=(80, columns))
    labels = (numbers.random(80) < 0.3 + 0.4 * (features[:, 0] > 0)).astype(float)
    found = detection.fit(features, labels)
    excess = 1.0 / (1.0 + np.exp(-found[0] - features @ found[1:])) - labels
    assert np.abs([excess.sum(), *(excess @ features)] + 1e-3 * found).max() < 1e-5


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


# Tables and figures of synthetic records: they work without AUROCs, and show what the draft adds.

def answer(problem: int, wrong: bool, level: int | None = 1, **changed) -> dict:
    """A record whose signals are larger if it is wrong, except those of the draft."""
    numbers = np.random.default_rng(problem)
    values = {name: float(numbers.random()) for name in signals.DRAFT}
    values.update({name: float(numbers.random() + 3.0 * wrong) for name in signals.TARGET})
    step = {"text": "1+1=2", "wrong": wrong, "num_tokens": 5, "num_compared": 4, "mean": values, "max": values}
    return {"problem": f"p{problem}", "chain": 0, "level": level, "verdict": "wrong" if wrong else "correct", "num_tokens": 40,
            "num_compared": 35, "mean": values, "max": values, "steps": [step], "steps_left_out": 0, **changed}


SKIPPED = {"problem": "p99", "chain": 0, "level": 1, "verdict": "not_drawn", "num_tokens": 0, "skipped": "not numbers"}
CASES = {
    "all right": [answer(n, False) for n in range(5)],
    "all wrong": [answer(n, True) for n in range(5)],
    "all skipped": [SKIPPED],
    "no steps": [answer(n, n % 2 == 0, steps=[]) for n in range(12)],
    "one problem": [answer(0, False), {**answer(0, True), "chain": 1}],
    "no levels": [answer(n, n % 2 == 0, level=None) for n in range(12)],
}


@pytest.mark.parametrize("name", CASES)
def test_without_wrong_or_right_cases_values_are_none_and_figures_say_so(name):
    found = tables.summary(CASES[name], 5, 10)
    json.dumps(found._asdict(), allow_nan=False)
    drawn = detection.figures(found)
    assert set(drawn) == {"fig_difficulty_auroc", "fig_difficulty_roc", "fig_difficulty_reliability"}
    for figure in drawn.values():
        figure.draw_without_rendering()
    panels = ["".join(text.get_text() for text in axes.texts) for axes in drawn["fig_difficulty_auroc"].axes]
    nothing = {"all right": "all are right", "all wrong": "all are wrong", "all skipped": "no case"}.get(name)
    if nothing:
        assert all(text.startswith(nothing) for text in panels)
        assert found.values["answers/best_draft_auroc"] is None
        assert all(row["auroc"] is None for row in found.tables["answers"])
        assert found.tables["reliability"] == found.tables["combined"] == found.data["roc"] == []
    else:
        assert panels == ["", "no case, so there is no AUROC" if name == "no steps" else ""]
        assert found.values["answers/best_baseline_auroc"] == 1.0
    assert found.values["num_skipped"] == (name == "all skipped")
    if name == "one problem":
        assert found.tables["answers"][0]["brier"] is None
        assert found.tables["answers"][0]["auroc_low"] is None
    assert ("level" in {row["signal"] for row in found.tables["answers"]}) == (name != "no levels")


def test_the_gain_from_a_draft_that_adds_information():
    numbers = np.random.default_rng(0)
    made = [answer(n, n % 3 == 0) for n in range(150)]
    for record in made:
        wrong = record["verdict"] == "wrong"
        for values in (record["mean"], record["max"]):
            values.update({name: float(numbers.normal() + wrong) for name in values})  # equally informative and independent
            values["draft_entropy"] = values["target_entropy"]
    gains = {row["signal"]: row for row in tables.summary(made, 5, 10).tables["combined"]
             if row["cases"] == "answers" and row["baseline"] == "target_entropy mean"}
    assert gains["kl_target_draft mean"]["auroc_gain_low"] > 0.01
    assert gains["kl_target_draft mean"]["brier_gain_low"] > 0.0
    assert abs(gains["draft_entropy mean"]["auroc_gain"]) < 1e-9
