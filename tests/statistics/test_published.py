"""The guided-power-sampling document's tables 4.1 to 4.4 and 6.3, from records with its counts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_mcmc.engine.batching.interface import Finished
from dflash_mcmc.runner.samples import record_of
from dflash_mcmc.statistics.outcomes import outcomes, restricted
from dflash_mcmc.statistics.paired import VarianceParts, compare, two_by_two
from dflash_mcmc.statistics.summaries import summarise
from dflash_mcmc.types import ChainResult, Cost, Grade, Problem, Trajectory
from tests import published

OUTCOMES = {name: outcomes(published.records(name)) for name in published.CONDITIONS}
SUMMARIES = {name: summarise(name, published.records(name)) for name in published.CONDITIONS}

TABLE_4_1 = {
    "greedy": (74, 71.2, 626, 64, None), "temp": (73, 70.2, 626, 65, None), "ps": (75, 72.1, 613, 511, 55.8),
    "blend_greedy": (71, 68.3, 627, 62, None), "blend_ps": (81, 77.9, 604, 471, 50.4),
}
TABLE_6_3 = {"ps": (75, 72.1, 55.8), "draft_blend_ps": (75, 72.1, 51.6), "blend_ps": (81, 77.9, 50.4)}


@pytest.mark.parametrize("name", TABLE_4_1)
def test_overall_accuracy(name):
    found = SUMMARIES[name]
    acceptance = found["acceptance"] and round(100 * found["acceptance"], 1)
    assert found["num_samples"] == found["num_problems"] == 104
    assert (found["correct"], round(100 * found["accuracy"], 1), round(found["mean_tokens"]), round(found["mean_seconds"]),
            acceptance) == TABLE_4_1[name]


@pytest.mark.parametrize("name", TABLE_6_3)
def test_draft_as_blend_source(name):
    found = SUMMARIES[name]
    assert (found["correct"], round(100 * found["accuracy"], 1), round(100 * found["acceptance"], 1)) == TABLE_6_3[name]


@pytest.mark.parametrize(("easy", "size", "solved"), [
    (True, 74, {"greedy": 74, "temp": 72, "ps": 70, "blend_greedy": 68, "blend_ps": 73}),
    (False, 30, {"greedy": 0, "temp": 1, "ps": 5, "blend_greedy": 3, "blend_ps": 8})], ids=["easy", "hard"])
def test_stratification_by_greedy_correctness(easy, size, solved):
    greedy = OUTCOMES["greedy"]
    subset = [name for name, correct in zip(greedy.problems, greedy.correct, strict=True) if bool(correct) == easy]
    assert len(subset) == size
    assert {name: restricted(OUTCOMES[name], subset).correct.sum() for name in solved} == solved


def test_answer_overlap_and_its_p_value():
    found = compare(OUTCOMES["ps"], OUTCOMES["blend_ps"])
    assert (found.both, found.only_a, found.only_b, found.neither) == (74, 1, 7, 22)
    assert round(-100 * found.difference.value, 1) == 5.8
    assert round(found.p_value, 3) == 0.070
    assert found.verdict == "tie"


def test_interaction():
    found = two_by_two(*(OUTCOMES[name] for name in ("greedy", "ps", "blend_greedy", "blend_ps")))
    assert {name: round(100 * cell.value, 1) for name, cell in found.cells.items()} == {
        "00": 71.2, "01": 72.1, "10": 68.3, "11": 77.9}
    assert found.effect.value == pytest.approx((81 - 71 - 75 + 74) / 104)
    assert found.effect.low < found.effect.value < found.effect.high


def test_the_document_s_difference_would_have_needed_more_problems():
    """With 8 of 104 discordant, 104 problems resolve 7.5 points and not the 5.8 that were found."""
    noise = VarianceParts.of(OUTCOMES["blend_ps"], OUTCOMES["ps"])
    assert round(100 * noise.resolved(104, 1), 1) == 7.5
    assert noise.problems_needed(6 / 104, 1) == 176


def test_draft_and_no_blend_are_a_tie():
    assert compare(OUTCOMES["draft_blend_ps"], OUTCOMES["ps"]).verdict == "tie"
    assert compare(OUTCOMES["draft_blend_ps"], OUTCOMES["ps"]).difference.value == 0.0


@pytest.mark.parametrize("name", published.CONDITIONS)
def test_records_are_consistent(name):
    """Verdicts, answers, lengths and counts agree with each other."""
    for record in published.records(name):
        assert json.loads(json.dumps(record)) == record
        assert (record["verdict"] == "no_answer") == (record["answer"] is None)
        assert (record["verdict"] == "correct") == (record["answer"] == record["gold"])
        assert len(record["tokens"]) == record["num_tokens"] <= 1024
        assert record["moved"] <= record["accepted"] <= record["proposals"] == len(record["trace"])
        assert all(0 <= entry["cut"] < entry["length"] for entry in record["trace"])


def test_records_have_the_fields_of_real_ones():
    """The order of the fields is that of recorded runs."""
    path = Trajectory.start(np.array([1])).extended(np.array([2]), np.zeros(1), np.zeros(1), np.zeros((1, 2)), True)
    done = Finished(0, ChainResult(path), Cost(), 1.0, 1.0)
    real = record_of(Problem("a", "question", "1"), 0, np.array([1]), Grade("correct", "1"), done,
                     SimpleNamespace(decode=str, stop_ids=()), "math 2")
    assert list(published.records("ps")[0]) == list(real)
