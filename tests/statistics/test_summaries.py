"""Summaries: rates are shares of proposals, means are over the samples that could be drawn."""

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from dflash_mcmc.runner.tasks import metrics_of
from dflash_mcmc.statistics.estimates import Clusters, accuracy, aligned, cautions, mean_share, outcomes, restricted, wilson
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
    assert summary["accepted_length"] is None
    summary = summarise("greedy", records[1:2])
    assert (summary["acceptance"], summary["moved_rate"]) == (None, None)  # without proposals
    assert summarise("greedy", []) == {"condition": "greedy", "num_problems": 0, "num_samples": 0}


def test_accepted_length_is_over_the_blocks_of_the_decoder():
    """The blocks of a sampler are among the drafted ones. A chain without a block of the decoder lacks the count."""
    drafted = {"tokens_drawn": 30, "blocks_drafted": 9, "tokens_drafted": 28, "tokens_kept": 11, "blocks_verified": 4,
               "tokens_verified": 14}
    others = {"tokens_drawn": 20, "blocks_drafted": 5}
    records = [record("a", "correct", answer="1", **drafted), record("a", "wrong", 1, answer="2", **others)]
    alone = {"tokens_drawn": 14, "blocks_drafted": 4, "tokens_drafted": 28, "tokens_kept": 11}  # of a run without a sampler's
    assert summarise("greedy", [record("a", "correct", **alone)])["accepted_length"] == 3.5
    assert summarise("mixture", records)["accepted_length"] == 3.5
    assert aggregate("mixture", records, "log_p", 2)["log_p/accepted_length"] == 3.5
    assert metrics_of({**records[0], "finish_reason": "length"})["sample/accepted_length"] == 3.5
    older = {name: value for name, value in records[0].items() if name != "tokens_verified"}
    assert summarise("mixture", [older])["accepted_length"] is None
    assert summarise("mixture", [older, *records])["accepted_length"] == 3.5


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


def test_chains_of_a_problem_that_agree_do_not_narrow_the_intervals_of_rates():
    chains = [record(str(number), "correct", chain, accepted=number % 3, moved=number % 2, abandoned=number % 4 // 2,
                     token_forwards=10 * number) for number in range(20) for chain in range(8)]
    assert rates(chains) == pytest.approx(rates([one for one in chains if one["chain"] == 0]))


def test_the_numbers_of_samplers_have_means_over_the_records_that_have_them():
    records = [record("a", "correct", measures={"log_z": -2.0}), record("b", "wrong", measures={"log_z": -4.0, "trips": 1.0}),
               record("c", "not_drawn")]
    assert measures(records) == {"measures/log_z": -3.0, "measures/trips": 1.0}
    assert measures([record("a", "correct")]) == {}


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


# Intervals clustered by problem: values by hand, coverage by simulation, and empty data.

def test_values_are_those_of_the_observations():
    clusters = Clusters(["a", "a", "b", "c"])
    assert clusters.mean([1, 2, 3, 6])[::3] == (3.0, 4)
    assert clusters.mean([1, 2, 3, 6], [True, False, True, False])[::3] == (2.0, 2)
    assert clusters.ratio([1, 0, 1, 1], [1, 1, 1, 1]).value == 0.75
    assert [e.value for e in clusters.quantiles([4, 1, 3, 2], [0.0, 0.25, 0.5, 1.0])] == [1, 1, 2, 4]
    assert clusters.statistic(lambda w: (w * [1, 2, 3, 6]).sum(axis=1) / w.sum(axis=1)).value == 3.0


def test_intervals_resample_whole_clusters():
    """100 observations in 4 clusters of equal values: a resample of clusters is a resample of 4 values."""
    of = np.repeat(np.arange(4), 25)
    found = Clusters(of.tolist()).mean(of.astype(float))
    assert found.high - found.low > 1.5, "25 times as many observations do not make it narrower"
    alone = Clusters(list(range(100))).mean(of.astype(float))
    assert alone.high - alone.low < (found.high - found.low) / 3


def test_paths_agree():
    numbers = np.random.default_rng(2)
    of, values = numbers.integers(0, 12, 200), numbers.normal(size=200)
    clusters = Clusters(of.tolist())
    mean = clusters.mean(values)
    general = clusters.statistic(lambda w: (w * values).sum(axis=1) / w.sum(axis=1))
    np.testing.assert_allclose(mean, general, rtol=1e-12)
    median = clusters.quantiles(values, [0.5])[0]
    assert median.low <= median.value <= median.high


def test_pieces_change_nothing(monkeypatch):
    of, values = np.arange(50) // 3, np.random.default_rng(3).normal(size=50)
    whole = Clusters(of.tolist()).quantiles(values, [0.1, 0.9])
    monkeypatch.setattr("dflash_mcmc.statistics.estimates._VALUES_AT_ONCE", 120)
    assert Clusters(of.tolist()).quantiles(values, [0.1, 0.9]) == whole


def test_a_ratio_to_which_one_cluster_contributes_has_no_interval():
    found = Clusters(["a", "a", "b", "c"]).mean([1, 3, 6, 6], [True, True, False, False])
    assert found == (2.0, None, None, 2)
    assert Clusters(["a", "a", "b", "c"]).mean([1, 3, 6, 6], [True, True, True, False]).interval is not None


def test_empty_data_and_single_clusters():
    nothing, one = Clusters([]), Clusters(["a", "a"])
    empty = (None, None, None, 0)
    assert nothing.mean([]) == nothing.quantiles([], [0.5])[0] == nothing.statistic(lambda w: w.sum(axis=1)) == empty
    assert one.mean([1.0, 2.0]) == (1.5, None, None, 2), "one problem has no interval"
    assert one.mean([1.0, 2.0], [False, False]) == (None, None, None, 0)
    assert one.quantiles([1.0, 2.0], [0.9])[0] == (2.0, None, None, 2)
    assert Clusters([1, 2]).mean([3, 5]).columns("x").keys() == {"x", "x_low", "x_high"}


def test_a_bootstrap_over_few_problems_carries_a_caution():
    """The bootstrap of 5 clusters covers far less than 95 %, so the line is true; that of 40 is near it (see above)."""
    numbers, hits = np.random.default_rng(2), 0
    for _ in range(300):
        found = Clusters(list(range(5))).mean(numbers.normal(size=5))
        hits += found.low <= 0.0 <= found.high
    assert hits < 270
    assert [number for number in range(40) if cautions([number])] == list(range(2, 11))
    assert [line.split(",")[0] for line in cautions([5, 40, 5, 3])] == [
        f"caution: some intervals are a bootstrap over {number} problems" for number in (5, 3)]


# Shares equal published values and statsmodels; chains of a problem are not independent.

def records(counts: list[int], chains: int = 1) -> list[dict]:
    """Records with this number of correct chains for each problem."""
    return [{"problem": str(problem), "chain": chain, "verdict": "correct" if chain < correct else "wrong"}
            for problem, correct in enumerate(counts) for chain in range(chains)]


def test_wilson_equals_statsmodels():
    for total in (1, 2, 7, 104, 5000):
        for correct in {0, 1, total // 3, total}:
            share = wilson(correct, total)
            assert (share.low, share.high) == pytest.approx(proportion_confint(correct, total, method="wilson"), abs=1e-12)
            assert (share.value, share.n) == (correct / total, total)
            assert accuracy(records([1] * correct + [0] * (total - correct))) == share


@pytest.mark.parametrize(("correct", "low", "high"), [(2, 0.722, 1.0), (0, 0.0, 0.278), (1, 0.237, 0.763)])
def test_equal_problems_still_have_an_interval(correct, low, high):
    share = accuracy(records([correct] * 10, chains=2))
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-4)


def test_unequal_chains_weigh_by_sample():
    """3 of 4 and 0 of 1 are 3 of 5."""
    given = [*records([3], chains=4), {"problem": "b", "chain": 0, "verdict": "wrong"}]
    assert accuracy(given).value == pytest.approx(0.6)
    assert accuracy(records([2], chains=2))[1:3] == (0.0, 1.0)  # one problem says nothing about others
    votes = [{"problem": str(n), "verdict": "tied", "correct": share} for n, share in enumerate((0.5, 1.0, 0.0, 0.25))]
    assert accuracy(votes).value == pytest.approx(0.4375)
    assert wilson(0, 0) == accuracy([]) == mean_share([]) == (None, None, None, 0)


def test_the_bootstrap_over_problems_covers():
    """The true accuracy is in about 95 % of the intervals of 300 experiments of 40 problems with 4 chains.

    Wilson's interval of 160 samples would cover it in about 80 %, since problems differ.
    """
    rng, covered, pooled = np.random.default_rng(5), 0, 0
    for _ in range(300):
        counts = rng.binomial(4, rng.beta(1.0, 1.0, 40))  # true accuracy 1/2
        share, naive = accuracy(records(counts.tolist(), chains=4)), wilson(int(counts.sum()), 160)
        covered += share.low <= 0.5 <= share.high
        pooled += naive.low <= 0.5 <= naive.high
    assert 0.91 <= covered / 300 <= 0.98
    assert pooled / 300 < 0.88


# Outcomes pool the chains of a problem; alignment keeps the common problems and counts the others.

def graded(problem: str, verdict: str, chain: int = 0) -> dict:
    return {"problem": problem, "chain": chain, "verdict": verdict}


def test_problems_are_in_order_of_first_appearance():
    found = outcomes([graded("b", "correct"), graded("a", "wrong"), graded("b", "no_answer", 1), graded("a", "not_drawn", 1)])
    assert found.problems == ("b", "a")
    assert found.correct.tolist() == [0.5, 0.0]
    assert found.chains.tolist() == [2, 2]
    assert not found.single
    assert outcomes([graded("a", "correct"), graded("b", "not_drawn")]).single
    assert not outcomes([{"problem": "a", "verdict": "tied", "correct": 0.5}]).single
    assert restricted(found, ["a", "b"]).correct.tolist() == [0.0, 0.5]
    with pytest.raises(KeyError):
        restricted(found, ["c"])


def test_alignment_keeps_what_both_have_and_counts_what_either_lacks():
    a = outcomes([graded(name, "correct") for name in "abcd"])
    b = outcomes([graded(name, "correct" if name == "c" else "wrong") for name in "xdcb"])
    left, right, left_out = aligned(a, b)
    assert left.problems == right.problems == ("b", "c", "d")
    assert right.correct.tolist() == [0.0, 1.0, 0.0]
    assert left_out == 2
    assert aligned(a, outcomes([]))[2] == 4
