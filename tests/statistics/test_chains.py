"""pass@k, votes and best of N, compared with enumerations of all subsets of k chains, and with examples computed by hand."""

import itertools
from collections import Counter

import numpy as np
import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics import paired
from dflash_mcmc.statistics.chains import affordable, aggregated, majority, pass_at_k, pass_curve, vote_curve
from dflash_mcmc.statistics.estimates import accuracy, forwards_together, outcomes
from dflash_mcmc.statistics.paired import agreement, compare
from dflash_mcmc.statistics.summaries import summarise
from dflash_mcmc.statistics.votes import PowerVote
from tests.statistics.test_summaries import record as summed


def chains(problem: str, *answers: str | None, gold: str = "1", **fields) -> list[dict]:
    """A chain for each answer: correct if it is the gold one, without an answer if None."""
    return [summed(problem, "no_answer" if answer is None else "correct" if answer.strip() == gold else "wrong", number,
                   answer=answer, gold=gold, log_q=-1.0, level=3, subject="Algebra", **fields)
            for number, answer in enumerate(answers)]


@pytest.mark.parametrize(("size", "k"), [(1, 1), (5, 2), (8, 3), (8, 8)])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_chain(size, k):
    for correct in range(size + 1):
        draws = list(itertools.combinations([True] * correct + [False] * (size - correct), k))
        assert pass_at_k(correct, size, k) == pytest.approx(np.mean([any(draw) for draw in draws]), abs=1e-12)
    assert 0.0 < pass_at_k(3, 100_000, 50_000) < 1.0
    with pytest.raises(ValueError, match="need 0 <= correct <= chains"):
        pass_at_k(1, size, size + 1)


def test_pass_curve_is_of_the_problems_with_all_chains():
    records = [*chains("a", "1", "2", "2", "2"), *chains("b", "2", "2", "2", "2"), *chains("c", "1")]
    rows = pass_curve(records)
    assert [(row["k"], row["n"], row["left_out"]) for row in rows] == [(1, 2, 1), (2, 2, 1), (4, 2, 1)]
    assert [row["pass_at_k"] for row in rows] == pytest.approx([0.125, 0.25, 0.5])
    assert pass_curve([]) == []


def test_majority_counts_texts_and_states_ties():
    rows = majority([*chains("won", "1", "1 ", "2"), *chains("lost", "2", "2", "1"), *chains("tied", "1", "2", "3", None),
                     *chains("tied_wrong", "2", "3"), *chains("silent", None, " "), *chains("one", None, "1", None)])
    found = {row["problem"]: row for row in rows}
    assert {name: row["correct"] for name, row in found.items()} == {
        "won": 1.0, "lost": 0.0, "tied": pytest.approx(1 / 3), "tied_wrong": 0.0, "silent": 0.0, "one": 1.0}
    assert [name for name, row in found.items() if row["tied"]] == ["tied", "tied_wrong"]
    assert [row["answer"] for row in rows] == ["1", "2", None, None, None, "1"]


def graded(*answers: tuple[str, str]) -> list[dict]:
    """A chain for each (answer, verdict)."""
    return [summed("a", verdict, number, answer=answer) for number, (answer, verdict) in enumerate(answers)]


def test_a_vote_is_a_normalised_text_for_right_and_wrong_answers():
    """Notations of one number are the same vote, right or wrong."""
    half = [("1/2", "correct"), ("0.5", "correct"), (r"\\frac12", "correct"), (r"\\dfrac{1}{2}", "timeout")]
    third = [("1/3", "wrong"), (r"\\frac{1}{3}", "wrong"), (r"\\frac13", "wrong"), ("1 / 3", "wrong")]
    row, = majority(graded(*half, *third))
    assert (row["tied"], row["correct"]) == (True, 0.5)
    row, = majority(graded(*half, *third[1:]))
    assert (row["answer"], row["correct"]) == ("1/2", 1.0)
    row, = majority(graded(*half[1:], *third))
    assert (row["answer"], row["correct"]) == ("1/3", 0.0)


def test_a_vote_is_right_if_the_text_that_it_returns_is():
    """The normal form drops words, and texts of one vote may differ in their verdicts."""
    row, = majority(graded(("2", "correct"), *4 * [(r"2 \text{ or } -2", "wrong")]))
    assert (row["answer"], row["correct"]) == (r"2 \text{ or } -2", 0.0)
    row, = majority(graded((r"2 \text{ or } -2", "wrong"), *4 * [("2", "correct")]))
    assert (row["answer"], row["correct"]) == ("2", 1.0)


def test_a_vote_does_not_know_the_gold_answer():
    """Texts that only the grader recognises as equal are different votes, as wrong answers are."""
    found = graded(("2/4", "correct"), (r"\\frac{3}{6}", "correct"), ("0.50", "correct"), ("3", "wrong"), ("3", "wrong"))
    row, = majority(found)
    assert (row["answer"], row["correct"]) == ("3", 0.0)
    row, = majority(found[:4])
    assert (row["tied"], row["correct"]) == (True, 0.75)


def enumerated_majority(answers: tuple, k: int) -> float:
    """By definition: the mean over all subsets. Within a subset, one of the answers with the most votes is drawn uniformly."""
    values = []
    for subset in itertools.combinations(answers, k):
        votes = Counter(answer for answer in subset if answer is not None)
        winners = [answer for answer, number in votes.items() if number == max(votes.values())]
        values.append(winners.count("1") / len(winners) if winners else 0.0)
    return float(np.mean(values))


@pytest.mark.parametrize("seed", range(6))
def test_majority_of_k_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    problems = [tuple(rng.choice(["1", "2", "3", "4", None], 8, p=rng.dirichlet(np.ones(5)))) for _ in range(4)]
    records = [record for number, answers in enumerate(problems) for record in chains(str(number), *answers)]
    for size in range(1, 9):  # a curve ends with all chains of a problem
        for row in vote_curve([record for record in records if record["chain"] < size]):
            expected = np.mean([enumerated_majority(answers[:size], row["k"]) for answers in problems])
            assert row["accuracy"] == pytest.approx(expected, abs=1e-12)
    full = vote_curve(records)[-1]
    assert (full["k"], full["accuracy"]) == (8, pytest.approx(np.mean([row["correct"] for row in majority(records)])))
    one = [record["verdict"] == "correct" for record in records]
    assert vote_curve(records)[0]["accuracy"] == pytest.approx(np.mean(one))


def test_votes_of_many_chains_are_counted_not_enumerated():
    """64 chains, 30 right, 34 with distinct wrong answers: a vote of 32 is nearly always right, a vote of one with 30 / 64."""
    records = chains("a", *["1"] * 30, *[f"wrong {number}" for number in range(34)])
    curve = {row["k"]: row["accuracy"] for row in vote_curve(records)}
    assert list(curve) == [1, 2, 4, 8, 16, 32, 64]
    assert curve[1] == curve[2] == pytest.approx(30 / 64)  # with two chains, any disagreement is a tie
    assert 0.999 < curve[32] <= curve[64] == 1.0


def test_best_by_log_p_is_the_most_likely_drawn_chain():
    records = chains("a", "1", "2", "1", "2")
    for record, log_p in zip(records, (-5.0, -3.0, -4.0, 0.0), strict=True):
        record["log_p"] = log_p
    records[3].update(verdict="not_drawn", answer=None)  # an empty sequence has log p 0
    row, = aggregated(records, "log_p")
    assert (row["correct"], row["num_chains"]) == (0.0, 4)
    records[2]["log_p"] = -3.0
    assert aggregated(records, "log_p")[0]["correct"] == 0.5
    row, = aggregated([{**record, "verdict": "not_drawn"} for record in records], "log_p")
    assert (row["correct"], row["verdict"]) == (0.0, "not_drawn")


def test_weights_need_the_log_probability_of_the_draws():
    records = chains("a", "1", "2", proposals=0)
    without = [{key: value for key, value in record.items() if key != "log_q"} for record in records]
    for given, message in ((without, "problem a, chain 0: the record has no log_q"), *(
            (chains("a", "1", **{"proposals": 0, **fields}), "log_q is not its log-probability")
            for fields in ({"proposals": 32}, {"trace": [{"candidate": 0}]}, {"measures": {"candidate_ess": 0.5}}))):
        with pytest.raises(UserError, match=message):
            aggregated(given, PowerVote())


def several() -> list[dict]:
    """Three problems of four chains: won, tied with half right, without answers."""
    return [*chains("won", "1", "1", "2", "1", seconds=2.0), *chains("tied", "1", "2", "1", "2"),
            *chains("silent", None, None, None, None)]


def test_a_combined_record_works_like_a_sample():
    records = aggregated(several())
    assert [record["verdict"] for record in records] == ["correct", "expected", "no_answer"]
    assert [record["correct"] for record in records] == [1.0, 0.5, 0.0]
    expected = {"seconds": 2.0, "share_seconds": 2.0, "token_forwards": 200, "num_tokens": 40, "num_chains": 4, "level": 3}
    assert records[0] | expected == records[0]
    assert accuracy(records).value == pytest.approx(0.5)
    summary = summarise("majority@4", records)
    assert (summary["correct"], summary["no_answer"], summary["mean_seconds"], summary["mean_log_p"]) == (1.5, 1, 4 / 3, None)
    single = outcomes([chain for chain in several() if chain["chain"] == 0])
    assert compare(outcomes(records), single).test == "paired permutation"
    given = zip(chains("a", "1", "1", "2"), (0.0, 0.2, 0.1), strict=True)
    assert aggregated([{**record, "law_error": error} for record, error in given])[0]["law_error"] == 0.2  # the largest
    given = zip(chains("a", "1", "1", "1"), (1.0, 4.0, 2.0), strict=True)
    timed = [{**record, "seconds": seconds} for record, seconds in given]
    slowest = [aggregated(timed, chains=number)[0]["seconds"] for number in (1, 2, 3)]  # pairs take 2, 4 and 4 s
    assert slowest == pytest.approx([7 / 3, 10 / 3, 4.0])
    by_log_p = aggregated(several(), "log_p")  # of equal values, one is drawn uniformly
    assert [row["correct"] for row in by_log_p] == [0.75, 0.5, 0.0]


@pytest.mark.parametrize("by", ["majority", "log_p", PowerVote(alpha=2.0)], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_fewer_chains_are_the_mean_over_all_ways_to_choose_them(by, number):
    given = several()
    for place, record in enumerate(given):
        log_p = -float(place * 7 % 5)  # some values are equal
        record.update(log_p=log_p, log_q=log_p, proposals=0, seconds=float(place * 5 % 3))
    given[5].update(verdict="not_drawn", answer=None)
    for found in aggregated(given, by, chains=number):
        own = [record for record in given if record["problem"] == found["problem"]]
        subsets = [aggregated(list(subset), by)[0] for subset in itertools.combinations(own, number)]
        more = ("effective", "dominated") if isinstance(by, PowerVote) else ()
        for name in ("correct", "token_forwards", "seconds", *more):
            assert found[name] == pytest.approx(np.mean([subset[name] for subset in subsets]))
        assert found["num_chains"] == number


def test_problems_with_fewer_chains_are_left_out_and_bad_numbers_refused():
    assert [record["problem"] for record in aggregated([*chains("a", "1", "1"), *chains("b", "1")], chains=2)] == ["a"]
    with pytest.raises(UserError, match="chains: given"):
        aggregated(several(), chains=0)


def test_chains_of_a_problem_read_its_prompt_once():
    """Chains cost 50 token-forwards each, 30 of them for the prompt: k chains cost 30 + 20 k. Sums of seconds are rounded."""
    assert [affordable(several(), budget) for budget in (10, 50, 149, 150, 10_000)] == [1, 1, 2, 3, 4]
    slow = [{**record, "seconds": 0.7} for record in chains("a", *"12121212")]
    assert sum(record["seconds"] for record in slow) / 8 > 0.7
    assert [affordable(slow, number * 0.7, "seconds") for number in (2, 3, 4, 5)] == [2, 3, 4, 5]
    records = [{**record, "prompt_forwards": 30} for record in several()]
    assert [affordable(records, budget) for budget in (10, 50, 69, 70, 109, 110, 10_000)] == [1, 1, 1, 2, 3, 4, 4]
    assert [record["token_forwards"] for record in aggregated(records)] == [110, 110, 110]
    for number in (1, 2, 3, 4):
        assert {record["token_forwards"] for record in aggregated(records, chains=number)} == {30 + 20 * number}
    assert forwards_together(records) == 3 * 110
    assert forwards_together([{**record, "prompt_forwards": 30 * (record["chain"] == 0)} for record in records]) == 3 * 200


# The permutation test of two runs: right level, power, and strata.

def drawn(generator, shift=0.0, problems=12, chains=4):
    """Values of problems that differ much more than a shift."""
    return {str(n): (10.0 * n + shift + generator.standard_normal(chains)).tolist() for n in range(problems)}


def test_one_problem_by_hand():
    """Two values against two: 2 of the 6 ways to share them differ as much as (1, 2) against (3, 4)."""
    found = agreement({"a": [1.0, 2.0]}, {"a": [3.0, 4.0], "b": [9.0]})
    assert (found.problems, found.samples_a, found.samples_b, found.difference) == (1, 2, 2, -2.0)
    assert found.p_value == pytest.approx(1 / 3, abs=0.02)
    assert agreement({"a": [1.0, 1.0]}, {"a": [1.0, 1.0]}).p_value == 1.0
    assert agreement({"a": [1.0]}, {"b": [1.0]}) is None


def test_a_shift_within_problems_is_seen_although_problems_differ_more():
    generator = np.random.default_rng(1)
    assert agreement(drawn(generator), drawn(generator, 1.0)).p_value < 0.001
    assert agreement(drawn(generator), drawn(generator, 100.0)).p_value == 1.0 / 10_000.0  # the observed labels count


def test_equal_laws_are_rejected_at_the_stated_rate():
    generator = np.random.default_rng(2)
    p_values = [agreement(drawn(generator, problems=4, chains=3), drawn(generator, problems=4, chains=3)).p_value
                for _ in range(200)]
    assert 0.01 < np.mean(np.array(p_values) <= 0.05) < 0.1
    assert 0.4 < np.mean(p_values) < 0.6


# Permutation tests: equal laws are not flagged, other laws are, and a p-value is exact for few pairs.

def counts(name: str, pairs: int, law: list[float]) -> np.ndarray:
    """Histograms (pairs, tokens) of 20 tokens each."""
    tokens = np.searchsorted(np.cumsum(law)[:-1], Key(1).fold_in(name).uniforms(0, 20 * pairs)).reshape(pairs, 20)
    return np.stack([np.bincount(mine, minlength=len(law)) for mine in tokens])


LAW, OTHER = [0.4, 0.3, 0.2, 0.1, 0.0], [0.5, 0.2, 0.2, 0.1, 0.0]


def test_equal_laws_are_not_flagged_and_p_values_are_uniform():
    p = np.sort([paired.histograms(counts(f"a {n}", 20, LAW), counts(f"b {n}", 20, LAW)).p for n in range(40)])
    assert np.abs(p - (np.arange(40) + 0.5) / 40).max() < 0.24  # Kolmogorov's bound at a level of 0.02


def test_another_law_is_flagged():
    found = paired.histograms(counts("a", 100, LAW), counts("b", 100, OTHER))
    assert found.p < 1e-3
    assert found.distance == pytest.approx(0.1, abs=0.03)
    assert found.noise < 0.04
    assert paired.histograms(same := counts("a", 10, LAW), same) == paired.SwapTest(0.0, 0.0, 1.0)


def test_p_value_equals_that_of_all_assignments():
    one, other = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0]), np.array([2.0, 7.0, 1.0, 1.5, 2.0, 6.0])
    all_means = [abs(np.mean(np.array(signs) * (one - other))) for signs in itertools.product((1, -1), repeat=6)]
    found = paired.means(one, other)
    assert found.p == pytest.approx(np.mean(np.array(all_means) >= found.distance - 1e-12), abs=0.04)


def test_the_observed_assignment_counts():
    """None of the 2,000 random assignments gives all 60 pairs one sign, so p is 1 of 2,001 and never 0."""
    assert paired.means(np.ones(60), np.zeros(60)).p == pytest.approx(1.0 / 2001.0)


def test_rare_cells_are_one_cell():
    """Cells with fewer than five expected counts in each sample are joined, so that two that differ there alone are equal."""
    one, other = np.array([[20, 20, 1, 0]] * 2), np.array([[20, 20, 0, 1]] * 2)
    assert paired.histograms(one, other).distance == 0.0
    assert paired.histograms(10 * one, 10 * other).distance > 0.0
