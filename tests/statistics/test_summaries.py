"""Summaries: rates are shares of proposals, means are over the samples that could be drawn."""

from __future__ import annotations

import pytest

from dflash_mcmc.runner.tracking import metrics_of
from dflash_mcmc.statistics.summaries import aggregate, aggregates_of, measures, rates, summarise, times


def record(problem: str, verdict: str, chain: int = 0, **rest) -> dict:
    return {"problem": problem, "chain": chain, "verdict": verdict, "num_tokens": 10, "log_p": -2.0, "seconds": 1.0,
            "share_seconds": 0.5, "proposals": 4, "accepted": 2, "moved": 1, "abandoned": 1, "law_error": 0.0,
            "tokens_drawn": 30, "tokens_skipped": 5, "token_forwards": 50, "target_forwards": 40,
            "blocks_drafted": 0, "tokens_drafted": 0, "tokens_kept": 0, **rest}


def test_summary():
    records = [record("a", "correct"), record("b", "wrong", proposals=0, accepted=0, moved=0), record("c", "no_answer")]
    summary = summarise("ps", records)
    assert summary["condition"] == "ps"
    assert (summary["correct"], summary["wrong"], summary["no_answer"]) == (1, 1, 1)
    assert summary["acceptance"] == 4 / 8
    assert summary["moved_rate"] == 2 / 8
    assert summary["token_forwards"] == 150
    assert summary["mean_tokens"] == 10


def test_accepted_length_is_over_blocks():
    drafted = {"tokens_drawn": 14, "blocks_drafted": 4, "tokens_drafted": 28, "tokens_kept": 11}
    assert summarise("greedy", [record("a", "correct", **drafted)])["accepted_length"] == 3.5
    assert summarise("greedy", [record("a", "correct")])["accepted_length"] is None


def test_accepted_length_is_over_the_blocks_of_the_decoder():
    """The blocks of a sampler are among the drafted ones. A chain without a block of the decoder lacks the count."""
    drafted = {"tokens_drawn": 30, "blocks_drafted": 9, "tokens_drafted": 28, "tokens_kept": 10, "blocks_verified": 4}
    others = {"tokens_drawn": 20, "blocks_drafted": 5}
    records = [record("a", "correct", answer="1", **drafted), record("a", "wrong", 1, answer="2", **others)]
    assert summarise("mixture", records)["accepted_length"] == 3.5
    assert aggregate("mixture", records, "log_p", 2)["log_p/accepted_length"] == 3.5
    assert metrics_of({**records[0], "finish_reason": "length"})["sample/accepted_length"] == 3.5


def test_combined_answers_have_their_own_keys():
    records = [record(problem, verdict, chain, answer="1" if verdict == "correct" else "2")
               for problem, verdicts in (("a", "ccw"), ("b", "cww"), ("c", "c")) for chain, verdict in
               enumerate({"c": "correct", "w": "wrong"}[letter] for letter in verdicts)]
    summary = {**summarise("ps", records), **aggregate("ps", records, "majority", 3)}
    found, = aggregates_of(summary)
    assert (found["condition"], found["correct"], found["num_samples"]) == ("ps, majority of 3", 1, 2)  # c has only one chain
    assert (found["token_forwards"], found["mean_token_forwards"]) == (300, 150)
    assert aggregates_of(summarise("ps", records)) == []
    assert aggregate("ps", records, "log_p", 3)["log_p/correct"] == 1.0  # equal log p: 2 of 3 right, and 1 of 3


def test_rates_have_intervals_over_problems():
    records = [record(str(number), "correct", accepted=number % 2 * 4, token_forwards=10 * number) for number in range(40)]
    found = rates(records)
    assert found["acceptance_low"] < 0.5 < found["acceptance_high"] < 0.7
    mean = summarise("ps", records)["mean_token_forwards"]
    assert found["mean_token_forwards_low"] < mean < found["mean_token_forwards_high"]
    greedy = [record("a", "correct", proposals=0, accepted=0, moved=0, abandoned=0)]
    assert rates(greedy)["acceptance_low"] is None


def test_the_numbers_of_samplers_have_means_over_the_records_that_have_them():
    records = [record("a", "correct", measures={"log_z": -2.0}), record("b", "wrong", measures={"log_z": -4.0, "trips": 1.0}),
               record("c", "not_drawn")]
    assert measures(records) == {"measures/log_z": -3.0, "measures/trips": 1.0}
    assert measures([record("a", "correct")]) == {}


def test_no_proposals_give_no_rate_and_no_records_no_accuracy():
    summary = summarise("greedy", [record("a", "correct", proposals=0, accepted=0, moved=0)])
    assert summary["acceptance"] is None
    assert summary["moved_rate"] is None
    assert summarise("greedy", []) == {"condition": "greedy", "num_problems": 0, "num_samples": 0}


def test_samples_not_drawn_count_as_wrong_and_in_no_mean():
    failed = record("c", "not_drawn", num_tokens=0, log_p=0.0, proposals=0, accepted=0, moved=0, abandoned=0)
    summary = summarise("ps", [record("a", "correct"), record("b", "wrong", law_error=0.1), failed])
    assert (summary["correct"], summary["not_drawn"], summary["num_samples"]) == (1, 1, 3)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    assert (summary["mean_tokens"], summary["mean_log_p"]) == (10, -2.0)
    assert (summary["acceptance"], summary["abandoned_rate"]) == (0.5, 0.25)
    assert summary["law_error"] == 0.1
    assert summarise("ps", [failed])["mean_tokens"] is None


def test_times_are_means_over_the_samples_that_were_measured():
    older, measured = record("a", "correct"), [record("b", "wrong", prefill_seconds=0.1, grade_seconds=0.02),
                                               record("c", "wrong", prefill_seconds=0.3, share_seconds=0.9)]
    assert times([older, *measured]) == pytest.approx(
        {"mean_prefill_seconds": 0.2, "mean_draw_seconds": 0.5, "mean_grade_seconds": 0.02})
    assert times([older]) == {}
