"""Weighted votes over records, and their expectation for fewer chains, compared with enumerations of all subsets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dflash_mcmc.statistics.chains import aggregated, majority, majority_curve, weighted_curve
from dflash_mcmc.statistics.rules import AnswerPower, PowerVote, SoftSat
from dflash_mcmc.statistics.summaries import aggregate, aggregates_of, summarise
from dflash_mcmc.statistics.votes import expected_weighted, weighted
from tests.refusals import refused
from tests.statistics.test_summaries import record

POWER, ANSWER = PowerVote(alpha=2.0), AnswerPower(alpha=2.0, gamma=2.0)
SOFTSAT = SoftSat(beta=1.0, saturation=0.75, low=0.75, high=17.0)
RULES = pytest.mark.parametrize("rule", [POWER, SOFTSAT, ANSWER], ids=lambda rule: rule.name)


def chains(problem: str, *given: tuple[str | None, float], log_q: float | None = None, **fields) -> list[dict]:
    """A chain for each (answer, log p), drawn from p unless log q is given; the answer 1 is correct."""
    return [record(problem, "no_answer" if answer is None else "correct" if answer.strip() == "1" else "wrong", number,
                   answer=answer, gold="1", log_p=log_p, log_q=log_p if log_q is None else log_q, level=1, subject="Algebra",
                   **{"proposals": 0, "accepted": 0, "moved": 0, "abandoned": 0, **fields})
            for number, (answer, log_p) in enumerate(given)]


def random_problems(seed: int, problems: int, size: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [found for number in range(problems) for found in chains(
        str(number), *zip(rng.choice(["1", "2", "3", None], size), rng.integers(-4, 0, size).astype(float), strict=True))]


def test_a_likely_chain_outvotes_two_unlikely_ones():
    """Draws from p: the weights for p^2 are p itself."""
    row, = weighted(chains("a", ("1", -1.0), ("2", -2.0), ("2 ", -3.0), (None, 0.0)), POWER)
    weights = np.exp([-1.0, -2.0, -3.0]) / np.exp([-1.0, -2.0, -3.0]).sum()
    assert (row["answer"], row["winners"], row["correct"], row["tied"]) == ("1", ["1"], 1.0, False)
    assert (row["answered"], row["chains"], row["chance"], row["dominated"]) == (3, 4, 1.0, 1.0)
    assert row["effective"] == pytest.approx(1.0 / (weights**2).sum())
    assert majority(chains("a", ("1", -1.0), ("2", -2.0), ("2 ", -3.0)))[0]["correct"] == 0.0


def test_a_draw_from_the_answer_law_is_judged_by_its_expected_accuracy():
    row, = weighted(chains("a", ("1", math.log(0.3)), ("2", math.log(0.1)), ("2", math.log(0.1))), ANSWER)
    assert (row["answer"], row["tied"]) == ("1", False)
    assert [row["correct"], row["chance"]] == pytest.approx([9 / 13, 9 / 13])  # 0.3 and 0.2, squared
    combined, = aggregated(chains("a", ("1", math.log(0.3)), ("2", math.log(0.1)), ("2", math.log(0.1))), ANSWER)
    assert (combined["verdict"], combined["answer"], combined["num_chains"]) == ("expected", "1", 3)


@RULES
def test_ties_and_silent_problems_are_as_in_the_majority_vote(rule):
    """Equal log p gives equal weights."""
    given = [*chains("tied", ("1", -1.0), ("2", -1.0), (None, -1.0)), *chains("silent", (None, -1.0), (None, -1.0)),
             *chains("one", ("1", -5.0), (None, 0.0))]
    found = {row["problem"]: row for row in weighted(given, rule)}
    for row in majority(given):
        own = found[row["problem"]]
        assert {key: own[key] for key in ("answer", "winners", "tied", "answered", "chains", "correct")} == {
            key: row[key] for key in ("answer", "winners", "tied", "answered", "chains", "correct")}
    assert [row["effective"] for row in found.values()] == pytest.approx([2.0, 0.0, 1.0])
    assert [row["dominated"] for row in found.values()] == [0.0, 0.0, 0.0]  # a single vote dominates nothing
    assert [row["verdict"] for row in aggregated(given, rule)] == [
        "tied", "no_answer", "correct"]


@pytest.mark.parametrize("seed", range(4))
def test_equal_weights_are_the_majority_vote(seed):
    """Importance weights for p itself, with draws from p, and softsat with beta 0."""
    records = random_problems(seed, 20, 7)
    for rule in (PowerVote(alpha=1.0), SoftSat(beta=0.0, saturation=0.75, low=0.75, high=17.0)):
        for own, row in zip(weighted(records, rule), majority(records), strict=True):
            assert (own["answer"], own["winners"], own["tied"]) == (row["answer"], row["winners"], row["tied"])
            assert own["correct"] == pytest.approx(row["correct"], abs=1e-12)
            assert own["effective"] == pytest.approx(row["answered"])
        for own, row in zip(weighted_curve(records, rule), majority_curve(records), strict=True):
            assert own == {key: value if value is None else pytest.approx(value, abs=1e-9) for key, value in row.items()}


@RULES
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_fewer_chains_are_the_mean_over_all_ways_to_choose_them(rule, number):
    records = random_problems(7, 3, 5)
    for found in aggregated(records, rule, chains=number):
        own = [row for row in records if row["problem"] == found["problem"]]
        subsets = [weighted(list(subset), rule)[0] for subset in itertools.combinations(own, number)]
        for name in ("correct", "effective", "dominated"):
            assert found[name] == pytest.approx(np.mean([subset[name] for subset in subsets]))
        assert found["token_forwards"] == 50 * number


def test_many_chains_are_sampled_and_not_all_ways_are_used():
    """20 chains: the 38,760 ways to choose 6 have a mean that 1,000 of them estimate within 5 standard errors."""
    records = random_problems(11, 1, 20)
    _, (found, _, _) = expected_weighted(records, POWER, [20, 6])
    values = [weighted([records[place] for place in subset], POWER)[0]["correct"]
              for subset in list(itertools.combinations(range(20), 6))[::7]]
    assert abs(found - np.mean(values)) < 5.0 * np.std(values) * math.sqrt(1 / 1000 + 1 / len(values))
    assert 0.0 < found < 1.0
    assert found == expected_weighted(records, POWER, [6])[0].correct  # nothing depends on a clock or an earlier call


def test_chains_that_were_not_drawn_do_not_vote():
    records = chains("a", ("1", -1.0), ("2", -2.0), ("3", 0.0))
    records[2].update(verdict="not_drawn", answer=None, log_p=0.0, log_q=0.0)
    row, = weighted(records, POWER)
    assert (row["answer"], row["answered"]) == ("1", 2)


def test_importance_weights_need_independent_draws():
    records = chains("a", ("1", -1.0), ("2", -2.0))
    for rule in (POWER, ANSWER):
        with refused("problem a, chain 0", "the record has no log_q", start=f"aggregate={rule.name}"):
            weighted([{key: value for key, value in row.items() if key != "log_q"} for row in records], rule)
        with refused("log_q is not its log-probability", "sampler=temperature"):
            weighted_curve([{**row, "proposals": 8} for row in records], rule)
        with refused("log_q is not its log-probability"):
            weighted([{**row, "trace": [{"candidate": 0}]} for row in records], rule)
    assert weighted([{**row, "proposals": 8, "log_q": None} for row in records], SOFTSAT)[0]["answered"] == 2


def test_the_summary_has_each_way_in_the_order_asked_for():
    records = [*chains("a", ("1", -1.0), ("2", -2.0), ("2", -3.0)), *chains("b", ("1", -1.0))]
    summary = summarise("temp", records)
    for by in (POWER, "majority", ANSWER):
        summary |= aggregate("temp", records, by, 3)
    power, plain, answer = aggregates_of(summary)
    assert [part["condition"] for part in (power, plain, answer)] == [
        "temp, power vote (alpha 2) of 3", "temp, majority of 3", "temp, answer power draw (alpha 2, gamma 2) of 3"]
    assert (power["correct"], power["num_samples"], power["accuracy"]) == (1, 1, 1.0)  # b has only one chain
    assert (plain["correct"], "effective_chains" in plain) == (0, False)
    assert power["effective_chains"] == pytest.approx(weighted(records[:3], POWER)[0]["effective"])
    assert (power["dominated"], power["token_forwards"], power["mean_log_p"]) == (1.0, 150, None)
    assert list(aggregate("temp", records[3:], POWER, 3)) == ["power/condition", "power/num_problems", "power/num_samples"]
