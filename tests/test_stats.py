"""Summaries: rates are over proposals, means over what could be drawn."""

from __future__ import annotations

import pytest

from dflash_mcmc.stats import summarise


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


def test_no_proposals_give_no_rate_and_no_records_no_accuracy():
    summary = summarise("greedy", [record("a", "correct", proposals=0, accepted=0, moved=0)])
    assert summary["acceptance"] is None
    assert summary["moved_rate"] is None
    assert summarise("greedy", []) == {"condition": "greedy", "num_problems": 0, "num_samples": 0}


def test_samples_that_could_not_be_drawn_count_against_accuracy_and_in_no_mean():
    failed = record("c", "not_drawn", num_tokens=0, log_p=0.0, proposals=0, accepted=0, moved=0, abandoned=0)
    summary = summarise("ps", [record("a", "correct"), record("b", "wrong", law_error=0.1), failed])
    assert (summary["correct"], summary["not_drawn"], summary["num_samples"]) == (1, 1, 3)
    assert summary["accuracy"] == pytest.approx(1 / 3)
    assert (summary["mean_tokens"], summary["mean_log_p"]) == (10, -2.0)
    assert (summary["acceptance"], summary["abandoned_rate"]) == (0.5, 0.25)
    assert summary["law_error"] == 0.1
    assert summarise("ps", [failed])["mean_tokens"] is None
