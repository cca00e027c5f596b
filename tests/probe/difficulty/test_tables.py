"""AUROC equals Mann-Whitney's statistic; resamples are of whole problems; differences are paired."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.probe import difficulty
from dflash_mcmc.probe.difficulty import Answers, Difficulty
from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate


def random_answers(seed: int, size: int = 60, problems: int = 17) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Problems, whether answers are wrong, an informative score and an uninformative one, both with ties."""
    numbers = np.random.default_rng(seed)
    wrong = numbers.random(size) < 0.4
    scores = numbers.integers(0, 9, size) + 2.0 * wrong
    return [f"p{n}" for n in numbers.integers(0, problems, size)], wrong, scores, numbers.integers(0, 3, size) * 1.0


def by_pairs(wrong: np.ndarray, scores: np.ndarray, weights: np.ndarray) -> float:
    """Weighted AUROC, pair by pair."""
    total = won = 0.0
    for i, j in itertools.product(np.flatnonzero(wrong), np.flatnonzero(~wrong)):
        total += weights[i] * weights[j]
        won += weights[i] * weights[j] * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
    return won / total if total else np.nan


def auroc(answers: Answers, scores: np.ndarray) -> IntervalEstimate:
    return answers.auroc(answers.pairs(scores))


def test_by_hand():
    answers = Answers("abcd", [True, False, True, False])
    assert auroc(answers, np.array([3.0, 1.0, 1.0, 2.0])).value == 0.625  # pairs: 1, 1, 0 and 1/2, of 4
    assert auroc(answers, np.array([4.0, 1.0, 3.0, 2.0])).value == 1.0
    assert auroc(answers, np.zeros(4)).value == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_auroc_equals_mann_whitney(seed):
    problems, wrong, scores, _ = random_answers(seed)
    statistic = stats.mannwhitneyu(scores[wrong], scores[~wrong]).statistic
    found = auroc(Answers(problems, wrong), scores)
    assert found.value == pytest.approx(statistic / (wrong.sum() * (~wrong).sum()), abs=1e-12)
    assert found.n == len(wrong)


def test_intervals_equal_those_of_weighted_answers():
    """For a signal and for a difference, equal to `Clusters.statistic` with weights of single answers."""
    problems, wrong, scores, other = random_answers(1, size=25, problems=9)
    answers, single = Answers(problems, wrong), Clusters(problems)
    weighted = single.statistic(lambda weights: np.array([by_pairs(wrong, scores, row) for row in weights]))
    assert auroc(answers, scores) == pytest.approx(weighted)
    paired = single.statistic(lambda weights: np.array([by_pairs(wrong, scores, row)
                                                        - by_pairs(wrong, other, row) for row in weights]))
    assert answers.auroc(answers.pairs(scores) - answers.pairs(other)) == pytest.approx(paired)
    assert answers.mean(scores, wrong) == pytest.approx(single.mean(scores, wrong))


def test_problems_are_resampled_not_answers():
    """Copies of a problem's answers add no information."""
    problems, wrong, scores, _ = random_answers(2, problems=60)
    one, many = (auroc(Answers(list(np.repeat(problems, times)), np.repeat(wrong, times)), np.repeat(scores, times))
                 for times in (1, 8))
    assert many[:3] == pytest.approx(one[:3])
    narrow = auroc(Answers(range(8 * len(wrong)), np.repeat(wrong, 8)), np.repeat(scores, 8))
    assert narrow.high - narrow.low < 0.5 * (many.high - many.low)


# Tables and the figure of synthetic records, which work without AUROCs.

def answer(problem: int, wrong: bool, level: int | None = 1, **changed) -> dict:
    """A record whose signals are larger if it is wrong, except those of the draft."""
    numbers = np.random.default_rng(problem)
    values = {name: float(numbers.random()) for name in difficulty.SIGNALS["draft"]}
    values.update({name: float(numbers.random() + 3.0 * wrong) for name in difficulty.SIGNALS["target"]})
    return {"problem": f"p{problem}", "chain": 0, "level": level, "verdict": "wrong" if wrong else "correct", "num_tokens": 40,
            "num_compared": 35, "mean": values, "max": values, **changed}


SKIPPED = {"problem": "p99", "chain": 0, "level": 1, "verdict": "not_drawn", "num_tokens": 0, "skipped": "not numbers"}
CASES = {
    "all right": ([answer(n, False) for n in range(5)], "all are right, so there is no AUROC"),
    "all wrong": ([answer(n, True) for n in range(5)], "all are wrong, so there is no AUROC"),
    "all skipped": ([SKIPPED], "no answer, so there is no AUROC"),
    "one problem": ([answer(0, False), {**answer(0, True), "chain": 1}], ""),
    "no levels": ([answer(n, n % 2 == 0, level=None) for n in range(12)], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_without_wrong_or_right_answers_values_are_none_and_the_figure_says_so(name):
    made, says = CASES[name]
    found = Difficulty().summarise(None, made)
    json.dumps(found._asdict(), allow_nan=False)
    figure = Difficulty().figures(None, made, found)["fig_difficulty_auroc"]
    figure.draw_without_rendering()
    assert "".join(text.get_text() for text in figure.axes[0].texts) == says
    if says:
        assert found.values["best_draft_auroc"] is None
        assert all(row["auroc"] is None for row in found.tables["answers"])
    else:
        assert found.values["best_baseline_auroc"] == 1.0
    assert found.values["num_skipped"] == (name == "all skipped")
    if name == "one problem":
        assert found.tables["answers"][0]["auroc_low"] is None
    assert ("level" in {row["signal"] for row in found.tables["answers"]}) == (name != "no levels")
