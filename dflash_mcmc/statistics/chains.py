"""Several chains a problem: pass@k, majority votes, the best of N, and runs turned into one record a problem.

A vote is an extracted answer, and knows nothing of the gold one: two answers are one vote where they are equal as strings,
once both are normalised (`grading.string_rule.normal_form`). What means the same and is written otherwise counts as different
votes, right or wrong: a vote that asked the grader, who knows what is right, would pool right answers alone. An answer is
correct where any of its texts was graded so. A sample without an answer does not vote. A tied vote counts as the expected
value of a fair draw among the winners; where nobody votes, the problem is wrong. Programs are no votes: nothing is equal
about two that solve the same problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NO_ANSWER, NOT_DRAWN
from dflash_mcmc.statistics.outcomes import by_problem
from dflash_mcmc.statistics.selection import check_key, expected_likeliest, weights
from dflash_mcmc.statistics.shares import mean_share
from dflash_mcmc.statistics.votes import Votes, expected_majority

_SUMMED = ("token_forwards", "target_forwards", "tokens_drawn", "tokens_skipped", "blocks_drafted", "tokens_drafted",
           "tokens_kept", "share_seconds", "num_tokens", "proposals", "accepted", "moved", "abandoned")
_LONGEST = "seconds"
"""From a chain's start to its end: chains are drawn beside each other, and the last one to end ends the vote."""


def pass_at_k(correct: int, chains: int, k: int) -> float:
    """Chance that any of k chains is correct, unbiased from `correct` of `chains` (Chen et al. 2021, arXiv 2107.03374).

    1 - C(chains - correct, k) / C(chains, k), as a product, so that nothing overflows. Raises ValueError.
    """
    if not (0 <= correct <= chains and 1 <= k <= chains):
        raise ValueError(f"pass_at_k({correct}, {chains}, {k}): need 0 <= correct <= chains and 1 <= k <= chains")
    if chains - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(chains - correct + 1, chains + 1)))


def pass_curve(records: Sequence[dict], ks: Sequence[int] | None = None) -> list[dict]:
    """Rows of k, `pass_at_k` with its interval, n problems, and how many were left out: those with fewer chains than any k.

    All rows are of the same problems, so that a curve never falls. `ks` None takes 1, 2, 4, ... and the largest number of
    chains of a problem.
    """
    problems, sizes, left_out = _with_enough(records, ks)
    counts = [(sum(record["verdict"] == "correct" for record in chains), len(chains)) for chains in problems]
    return [{"k": k, **mean_share([pass_at_k(*count, k) for count in counts]).columns("pass_at_k"), "n": len(counts),
             "left_out": left_out} for k in sizes]


def majority(records: Sequence[dict]) -> list[dict]:
    """The vote of each problem.

    Rows of problem; answer (the winner's most frequent text, None without a single winner); votes (of a winner); answered and
    chains (how many voted, of how many); tied (whether several won); winners (their answers); correct (in [0, 1]).
    """
    rows = []
    for problem, chains in by_problem(records).items():
        votes = Votes.of(chains)
        winners = votes.winners()
        rows.append({"problem": problem, "answer": winners[0].answer if len(winners) == 1 else None,
                     "votes": winners[0].number if winners else 0, "answered": votes.answered, "chains": len(chains),
                     "tied": len(winners) > 1, "winners": [winner.answer for winner in winners],
                     "correct": sum(winner.correct for winner in winners) / max(1, len(winners))})
    return rows


def majority_curve(records: Sequence[dict], ks: Sequence[int] | None = None) -> list[dict]:
    """Rows of k, `accuracy` of a vote of k chains with its interval, n problems, and how many were left out, as `pass_curve`.

    The accuracy is the mean over all ways to take k of a problem's chains: exact, nothing is drawn.
    """
    problems, sizes, left_out = _with_enough(records, ks)
    expected = [expected_majority(Votes.of(chains).counts(), tuple(sizes)) for chains in problems]
    return [{"k": k, **mean_share([row[place] for row in expected]).columns("accuracy"), "n": len(expected),
             "left_out": left_out} for place, k in enumerate(sizes)]


def best_of(records: Sequence[dict], key: str, alpha: float | None = None) -> list[dict]:
    """One chain of each problem, chosen by weight; those that could not be drawn are never chosen.

    Args:
        key: `log_p` takes the chain with the largest log p, among equal ones a fair draw. `power` draws a chain with weights
            exp(alpha * log_p - log_q), normalised over the problem's chains: importance resampling of p^alpha from the law
            that the chains were drawn from.
        alpha: of `power`.

    Returns:
        Rows of problem; answer (of the chain with the largest weight); chains; tied (whether several have it); effective (how
        many chains the weights amount to, 1 / sum of squares); correct (in [0, 1], expected over the draw).

    Raises:
        UserError: for `power` without alpha or log_q, or of chains whose sampler has chosen among draws, as by
            Metropolis-Hastings: log_q is then not the law that they come from.
    """
    check_key(records, key, alpha)
    rows = []
    for problem, chains in by_problem(records).items():
        chances = weights(chains, key, alpha)
        correct = sum(chance for chance, record in zip(chances, chains, strict=True) if record["verdict"] == "correct")
        rows.append({"problem": problem, "answer": chains[int(np.argmax(chances))]["answer"], "chains": len(chains),
                     "tied": bool(chances.any() and (chances == chances.max()).sum() > 1),
                     "effective": float(1.0 / np.sum(chances**2)) if chances.any() else 0.0,
                     "correct": round(float(correct), 12)})
    return rows


def aggregated(records: Sequence[dict], by: str = "majority", alpha: float | None = None,
               chains: int | None = None) -> list[dict]:
    """One record a problem out of several chains, to stand beside single samples in every table.

    `correct` is the share in [0, 1] that statistics take (see `outcomes.score`); verdict is `correct`, `wrong`, `no_answer`
    (no chain has one), `not_drawn` (none could be), `tied` (a tied vote that a correct answer may win) or `expected`
    (any other share between 0 and 1). Tokens, forwards and `share_seconds` are those of all chains together, `seconds` those
    of the longest, as if all had begun together; `num_chains` tells their number; log_p is None, since a vote has none.

    Args:
        by: `majority`, or a key of `best_of`.
        alpha: of `power`.
        chains: None takes all. Of fewer, `correct` and costs are means over all ways to take so many of a problem's chains,
            and problems with fewer are left out. Not for `power`.

    Raises:
        UserError: as `best_of`, or for chains < 1, or with `power`.
    """
    if chains is not None and (by == "power" or chains < 1):
        raise UserError(f"chains: given {chains}; allowed: a whole number >= 1, and null for best of several chains by power")
    kept = [found for found in by_problem(records).values() if chains is None or len(found) >= chains]
    flat = [record for found in kept for record in found]
    rows = majority(flat) if by == "majority" else best_of(flat, by, alpha)
    return [_aggregate(_of_fewer(row, found, by, chains), found, chains or len(found))
            for row, found in zip(rows, kept, strict=True)]


def affordable(records: Sequence[dict], budget: float, cost: str = "token_forwards") -> int:
    """How many chains of a problem cost no more than the budget: at least 1, at most as many as a problem has.

    Args:
        records: at least one.
        budget: mean cost of a problem under what is compared with.
        cost: field of the records whose sum is compared.
    """
    most = max(map(len, by_problem(records).values()))
    total = sum(record[cost] for record in records)
    return most if total <= 0 else max(1, min(most, int(budget * len(records) / total + 1e-9)))


def _of_fewer(row: dict, chains: list[dict], by: str, number: int | None) -> dict:
    """The row of a problem, of so many of its chains."""
    if number is None or number == len(chains):
        return row
    correct = (expected_majority(Votes.of(chains).counts(), (number,))[0] if by == "majority"
               else expected_likeliest(chains, number))
    return {**row, "answer": None, "tied": False, "correct": correct}


def _aggregate(row: dict, chains: list[dict], number: int) -> dict:
    first, verdicts = chains[0], {record["verdict"] for record in chains}
    if verdicts <= {NO_ANSWER, NOT_DRAWN}:
        verdict = NO_ANSWER if NO_ANSWER in verdicts else NOT_DRAWN
    else:
        verdict = {0.0: "wrong", 1.0: "correct"}.get(row["correct"], "tied" if row["tied"] else "expected")
    spent = {name: sum(record[name] for record in chains) for name in _SUMMED if name in first}
    if number < len(chains):
        spent = {name: total * number / len(chains) for name, total in spent.items()}
    if _LONGEST in first:
        spent[_LONGEST] = _expected_longest([record[_LONGEST] for record in chains], number)
    return {"problem": row["problem"], "chain": 0, "level": first.get("level"), "subject": first.get("subject"),
            "verdict": verdict, "correct": row["correct"], "answer": row["answer"], "gold": first.get("gold"), "log_p": None,
            "num_chains": number, "law_error": max(record.get("law_error", 0.0) for record in chains), **spent}


def _expected_longest(seconds: list[float], number: int) -> float:
    """Mean of the largest, over all ways to take so many."""
    ways = math.comb(len(seconds), number)
    return sum(value * math.comb(place, number - 1) for place, value in enumerate(sorted(seconds))) / ways


def _with_enough(records: Sequence[dict], ks: Sequence[int] | None) -> tuple[list[list[dict]], list[int], int]:
    """The chains of each problem that has as many as the largest k; the k; how many problems have fewer."""
    problems = list(by_problem(records).values())
    most = max(map(len, problems), default=0)
    sizes = sorted({2**power for power in range(most.bit_length())} | {most} - {0}) if ks is None else list(ks)
    if any(k < 1 for k in sizes):
        raise UserError(f"k: given {min(sizes)}; allowed: whole numbers >= 1")
    kept = [chains for chains in problems if len(chains) >= max(sizes, default=0)]
    return kept, sizes, len(problems) - len(kept)
