"""Adaptive votes: the stopping rule, its expected result and its cost, compared with every order drawn one after another."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dflash_mcmc.statistics.chains import aggregated, majority_curve, weighted_curve
from dflash_mcmc.statistics.rules import AdaptiveVote
from dflash_mcmc.statistics.votes import expected_adaptive
from tests.statistics.test_weighted import chains, random_problems

RULE = AdaptiveVote(confidence=0.9)


def surely_leads(leader: int, second: int, confidence: float) -> bool:
    """P(share > 1/2) under Beta(leader + 1, second + 1): the chance of more than `second` heads in the tosses."""
    tosses = leader + second + 1
    return sum(math.comb(tosses, heads) for heads in range(second + 1, tosses + 1)) / 2**tosses >= confidence


def by_order(order: list[str | None], confidence: float) -> tuple[float, int]:
    """The chance to return the answer "1", and the number of chains, for answers that are drawn in this order."""
    for number in range(1, len(order) + 1):
        votes = [answer for answer in order[:number] if answer is not None]
        counts = sorted((votes.count(answer) for answer in set(votes)), reverse=True)
        if number == len(order) or surely_leads(*(*counts, 0, 0)[:2], confidence):
            winners = [answer for answer in set(votes) if votes.count(answer) == counts[0]]
            return ("1" in winners) / max(1, len(winners)), number
    raise AssertionError


def by_hand(orders: list[list[str | None]], confidence: float) -> tuple[float, ...]:
    """The means over orders."""
    return tuple(np.mean([by_order(order, confidence) for order in orders], axis=0))


@pytest.mark.parametrize("confidence", [0.7, 0.9, 0.99])
@pytest.mark.parametrize("most", [1, 3, 6])
def test_the_expected_result_is_the_mean_over_all_orders(confidence, most):
    rng = np.random.default_rng(most)
    for _ in range(6):
        answers = rng.choice(["1", "2", "3", None], 6 if most == 6 else 5, p=[0.5, 0.25, 0.1, 0.15]).tolist()
        records, rule = chains("a", *((answer, -1.0) for answer in answers)), AdaptiveVote(confidence=confidence)
        found = expected_adaptive(records, rule, most)
        assert found == pytest.approx(by_hand(list(itertools.permutations(answers, most)), confidence), abs=1e-9)


def test_a_clear_leader_ends_the_vote_and_only_its_chains_are_paid():
    """Four votes of one answer: P = 1 - 2^-5 = 0.97; three give 0.94."""
    rule, of_four = AdaptiveVote(confidence=0.95), chains("a", *[("1", -1.0)] * 8, token_forwards=10.0, seconds=2.0)
    vote, = aggregated(of_four, rule)
    assert (vote["correct"], vote["num_chains"], vote["token_forwards"], vote["seconds"]) == (1.0, 4.0, 40.0, 8.0)
    never = AdaptiveVote(confidence=0.999999)
    vote, = aggregated(of_four, never)
    assert (vote["num_chains"], vote["token_forwards"]) == (8.0, 80.0)


def test_a_vote_that_never_ends_early_is_the_majority_vote():
    records = random_problems(3, problems=12, size=7)
    never = AdaptiveVote(confidence=1.0 - 1e-9)
    assert [row["accuracy"] for row in weighted_curve(records, never, [7])] == pytest.approx(
        [row["accuracy"] for row in majority_curve(records, [7])], abs=1e-9)
    assert [vote["correct"] for vote in aggregated(records, never)] == pytest.approx(
        [vote["correct"] for vote in aggregated(records)], abs=1e-9)


def test_a_vote_without_any_answer_needs_all_chains_and_has_no_result():
    vote, = aggregated(chains("a", *[(None, -1.0)] * 3, token_forwards=10.0), RULE)
    assert (vote["correct"], vote["verdict"], vote["num_chains"], vote["token_forwards"]) == (0.0, "no_answer", 3.0, 30.0)


def test_many_orders_are_sampled_with_a_fixed_seed():
    """An independent simulation of 2,000 orders; 1,000 orders have a standard error of at most 1.6 points."""
    answers = ["1"] * 6 + ["2"] * 5 + ["3"] * 3 + [None] * 2
    found = expected_adaptive(chains("a", *((answer, -1.0) for answer in answers)), RULE, 12)
    assert found == expected_adaptive(chains("a", *((answer, -1.0) for answer in answers)), RULE, 12)
    rng = np.random.default_rng(0)
    correct, used = by_hand([[answers[place] for place in rng.permutation(16)[:12]] for _ in range(2_000)], RULE.confidence)
    assert found.correct == pytest.approx(correct, abs=0.06)
    assert found.used == pytest.approx(used, abs=0.4)
