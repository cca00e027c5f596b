"""Outcomes pool the chains of a problem; alignment keeps the common problems and counts the others."""

from __future__ import annotations

import pytest

from dflash_mcmc.statistics.outcomes import aligned, outcomes, restricted


def record(problem: str, verdict: str, chain: int = 0) -> dict:
    return {"problem": problem, "chain": chain, "verdict": verdict}


def test_problems_are_in_order_of_first_appearance():
    found = outcomes([record("b", "correct"), record("a", "wrong"), record("b", "no_answer", 1), record("a", "not_drawn", 1)])
    assert found.problems == ("b", "a")
    assert found.correct.tolist() == [0.5, 0.0]
    assert found.chains.tolist() == [2, 2]
    assert not found.single


def test_single_means_one_chain_that_is_correct_or_not():
    assert outcomes([record("a", "correct"), record("b", "not_drawn")]).single
    assert not outcomes([{"problem": "a", "verdict": "tied", "correct": 0.5}]).single


def test_alignment_keeps_what_both_have_and_counts_what_either_lacks():
    a = outcomes([record(name, "correct") for name in "abcd"])
    b = outcomes([record(name, "correct" if name == "c" else "wrong") for name in "xdcb"])
    left, right, left_out = aligned(a, b)
    assert left.problems == right.problems == ("b", "c", "d")
    assert right.correct.tolist() == [0.0, 1.0, 0.0]
    assert left_out == 2
    assert aligned(a, outcomes([]))[2] == 4


def test_restriction_keeps_the_given_order():
    found = restricted(outcomes([record("a", "correct"), record("b", "wrong")]), ["b", "a"])
    assert found.correct.tolist() == [0.0, 1.0]
    with pytest.raises(KeyError):
        restricted(found, ["c"])
