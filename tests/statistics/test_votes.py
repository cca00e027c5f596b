"""The weights of each rule: exact answer laws on the tabular engine."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from dflash_mcmc.engine.oracle.tabular import TabularEngine, TabularModel
from dflash_mcmc.ops import SamplingParams
from dflash_mcmc.statistics.chains import aggregated, majority, vote_curve
from dflash_mcmc.statistics.summaries import aggregate, aggregates_of, summarise
from dflash_mcmc.statistics.votes import AdaptiveVote, PowerVote, Votes, adaptive, chances, expected_weighted
from dflash_mcmc.testing import power_target, score
from tests.statistics.test_summaries import record

HORIZON, EXACT = 3, 1e-12
ENGINE = TabularEngine(TabularModel(3, (0,), seed=5, scale=0.4))
STATES = power_target(ENGINE, HORIZON, 1.0, SamplingParams(), "blended").states
ANSWERS = ("0", "1", "2")


def answer_of(tokens: tuple[int, ...]) -> str | None:
    """The number of tokens 2 in a sequence that ended; a sequence that did not end has no answer."""
    return str(tokens.count(2)) if tokens[-1] == 0 else None


def answer_law(alpha: float) -> np.ndarray:
    """The law of the answers under p^alpha of whole sequences, among the sequences with an answer."""
    target, mass = power_target(ENGINE, HORIZON, alpha, SamplingParams(), "blended"), Counter()
    for tokens, probability in zip(target.states, target.probability, strict=True):
        mass[answer_of(tokens)] += probability
    values = np.array([mass[answer] for answer in ANSWERS])
    return values / values.sum()


def columns(drawn: list[tuple[int, ...]], log_q: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(supports, votes, log_p, log_q) of chains; `supports` is (chains, answers)."""
    supports = np.array([[answer_of(tokens) == answer for answer in ANSWERS] for tokens in drawn])
    log_p = np.array([score(ENGINE, tokens, SamplingParams(), "blended").log_p.sum() for tokens in drawn])
    return supports, supports.any(axis=1), log_p, np.array(log_q)


def enumeration(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All equally likely draws from a law q that has no relation to p: each sequence, as often as q says."""
    counts = np.random.default_rng(seed).integers(1, 6, len(STATES))
    drawn = [tokens for tokens, count in zip(STATES, counts, strict=True) for _ in range(count)]
    return columns(drawn, [math.log(count / counts.sum()) for count in counts for _ in range(count)])


def scores_of(rule, supports, votes, log_p, log_q) -> np.ndarray:
    return rule.weights(votes, log_p, log_q) @ supports


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_power_scores_are_the_answer_law_of_p_alpha(alpha, seed):
    found = scores_of(PowerVote(alpha=alpha), *enumeration(seed))
    assert np.abs(found - answer_law(alpha)).max() <= EXACT
    assert chances(found).tolist() == (found == found.max()).astype(float).tolist()


def test_no_votes_have_no_weight_and_very_unlikely_chains_have_one():
    rule, none = PowerVote(alpha=4.0), np.zeros(3, bool)
    weights = rule.weights(none, np.zeros(3), np.zeros(3))
    assert weights.tolist() == [0.0, 0.0, 0.0]
    assert chances(np.zeros(2)).tolist() == [0.0, 0.0]
    assert chances(np.zeros(0)).tolist() == []
    far = np.array([-90_000.0, -90_001.0, -90_000.0])
    found = rule.weights(np.ones(3, bool), far, far)
    assert found.sum() == pytest.approx(1.0)
    assert found[0] == found[2] > found[1]


# Adaptive votes: the stopping rule and its cost, compared with answers that are read one after another.

RULE = AdaptiveVote(confidence=0.9)


def by_order(order: list[str | None], confidence: float) -> tuple[float, int]:
    """The chance to return the answer "1", and the number of chains, for answers that are drawn in this order."""
    for number in range(1, len(order) + 1):
        votes = [answer for answer in order[:number] if answer is not None]
        counts = sorted((votes.count(answer) for answer in set(votes)), reverse=True)
        leader, second = (*counts, 0, 0)[:2]
        if number == len(order) or stats.beta.sf(0.5, leader + 1, second + 1) >= confidence:
            winners = [answer for answer in set(votes) if votes.count(answer) == counts[0]]
            return ("1" in winners) / max(1, len(winners)), number
    raise AssertionError


@pytest.mark.parametrize("confidence", [0.7, 0.9, 0.99])
@pytest.mark.parametrize("most", [1, 3, 9])
def test_an_adaptive_vote_ends_where_its_leader_is_likely_enough(confidence, most):
    rng, rule = np.random.default_rng(most), AdaptiveVote(confidence=confidence)
    for _ in range(20):
        answers = rng.choice(["1", "2", "3", None], 9, p=[0.5, 0.25, 0.1, 0.15]).tolist()
        records = draws_of("a", *((answer, -1.0) for answer in answers))
        correct, drawn = by_order(answers[:most], confidence)
        assert adaptive(records[::-1], rule, most) == (pytest.approx(correct), drawn), "chains have an order of their own"
        vote, = aggregated(records, rule, chains=most)
        assert (vote["correct"], vote["num_chains"]) == (pytest.approx(correct), drawn)


def test_an_adaptive_vote_costs_the_chains_that_it_draws():
    """Two equal answers end it (P = 1 - 2^-3): the third chain costs nothing, and the prompt is read once."""
    chains = draws_of("a", ("1", -1.0), ("1", -1.0), ("2", -1.0))
    records = [{**row, "token_forwards": spent, "prompt_forwards": 20, "seconds": 2.0}
               for row, spent in zip(chains, (30.0, 50.0, 1000.0), strict=True)]
    vote, = aggregated(records, AdaptiveVote(confidence=0.8))
    assert (vote["token_forwards"], vote["seconds"], vote["effective"]) == (60.0, 4.0, 2.0)


def test_a_vote_without_any_answer_needs_all_chains_and_has_no_result():
    vote, = aggregated(draws_of("a", *[(None, -1.0)] * 3, token_forwards=10.0), RULE)
    assert (vote["correct"], vote["verdict"], vote["num_chains"], vote["token_forwards"]) == (0.0, "no_answer", 3, 30.0)


# Weighted votes over records, and their expectation for fewer chains, compared with enumerations of all subsets.

POWER = PowerVote(alpha=2.0)


def draws_of(problem: str, *given: tuple[str | None, float], log_q: float | None = None, **fields) -> list[dict]:
    """A chain for each (answer, log p), drawn from p unless log q is given; the answer 1 is correct."""
    return [record(problem, "no_answer" if answer is None else "correct" if answer.strip() == "1" else "wrong", number,
                   answer=answer, gold="1", log_p=log_p, log_q=log_p if log_q is None else log_q, level=1, subject="Algebra",
                   **{"proposals": 0, "accepted": 0, "moved": 0, "abandoned": 0, **fields})
            for number, (answer, log_p) in enumerate(given)]


def random_draws(seed: int, problems: int, size: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [found for number in range(problems) for found in draws_of(
        str(number), *zip(rng.choice(["1", "2", "3", None], size), rng.integers(-4, 0, size).astype(float), strict=True))]


def test_a_likely_chain_outvotes_two_unlikely_ones():
    """Draws from p: the weights for p^2 are p itself."""
    row, = aggregated(draws_of("a", ("1", -1.0), ("2", -2.0), ("2 ", -3.0), (None, 0.0)), POWER)
    weights = np.exp([-1.0, -2.0, -3.0]) / np.exp([-1.0, -2.0, -3.0]).sum()
    assert (row["correct"], row["num_chains"], row["dominated"]) == (1.0, 4, 1.0)
    assert row["effective"] == pytest.approx(1.0 / (weights**2).sum())
    assert majority(draws_of("a", ("1", -1.0), ("2", -2.0), ("2 ", -3.0)))[0]["correct"] == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_equal_weights_are_the_majority_vote(seed):
    """Importance weights for p itself, with draws from p."""
    records, rule = random_draws(seed, 20, 7), PowerVote(alpha=1.0)
    for own, row in zip(aggregated(records, rule), majority(records), strict=True):
        assert own["correct"] == pytest.approx(row["correct"], abs=1e-12)
        votes = Votes.of([record for record in records if record["problem"] == row["problem"]])
        assert own["effective"] == pytest.approx(7 - votes.silent)
    for own, row in zip(vote_curve(records, rule), vote_curve(records), strict=True):
        assert own == {key: value if value is None else pytest.approx(value, abs=1e-9) for key, value in row.items()}


@pytest.mark.slow
def test_many_chains_are_sampled_and_not_all_ways_are_used():
    """20 chains: the 38,760 ways to choose 6 have a mean that 1,000 of them estimate within 5 standard errors."""
    records = random_draws(11, 1, 20)
    _, (found, _, _) = expected_weighted(records, POWER, [20, 6])
    values = [aggregated([records[place] for place in subset], POWER)[0]["correct"]
              for subset in list(itertools.combinations(range(20), 6))[::7]]
    assert abs(found - np.mean(values)) < 5.0 * np.std(values) * math.sqrt(1 / 1000 + 1 / len(values))
    assert 0.0 < found < 1.0
    assert found == expected_weighted(records, POWER, [6])[0].correct  # nothing depends on a clock or an earlier call


def test_chains_that_were_not_drawn_do_not_vote():
    records = draws_of("a", ("1", -1.0), ("2", -2.0), ("3", 0.0))
    records[2].update(verdict="not_drawn", answer=None, log_p=0.0, log_q=0.0)
    assert aggregated(records, POWER)[0] | {"correct": 1.0, "dominated": 1.0} == aggregated(records, POWER)[0]
    assert aggregated(records, POWER)[0]["effective"] < 2.0


def test_the_summary_has_each_way_in_the_order_asked_for():
    records = [*draws_of("a", ("1", -1.0), ("2", -2.0), ("2", -3.0)), *draws_of("b", ("1", -1.0))]
    summary = summarise("temp", records)
    for by in (POWER, "majority", RULE):
        summary |= aggregate("temp", records, by, 3)
    power, plain, stopped = aggregates_of(summary)
    assert [part["condition"] for part in (power, plain, stopped)] == [
        "temp, power vote (alpha 2) of 3", "temp, majority of 3", "temp, adaptive vote (confidence 0.9) of 3"]
    assert (power["correct"], power["num_samples"], power["accuracy"]) == (1, 1, 1.0)  # b has only one chain
    assert (plain["correct"], "effective_chains" in plain) == (0, False)
    assert power["effective_chains"] == pytest.approx(aggregated(records[:3], POWER)[0]["effective"])
    assert (power["dominated"], power["token_forwards"], power["mean_log_p"]) == (1.0, 150, None)
    assert list(aggregate("temp", records[3:], POWER, 3)) == ["power/condition", "power/num_problems", "power/num_samples"]
