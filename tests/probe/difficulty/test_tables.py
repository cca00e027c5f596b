"""Tables and figures of synthetic records: they work without AUROCs, and show what the draft adds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash_mcmc.probe.difficulty import detection, signals, tables


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
