"""Several chains per problem: pass@k, majority votes, best of N, and one combined record per problem.

A vote is an extracted answer. Two answers are the same vote if their normalised strings are equal
(`grading.math.string_rule.normal_form`). Equivalent answers that are written differently are different votes, whether they are
right or wrong: merging votes with the grader would use the gold answer, and would merge right answers only. An answer is
as correct as its most frequent text. A sample without an answer does not vote. A tied vote counts as the expected
value of a uniform draw among the winners; if no sample votes, the problem is wrong. Different programs can solve the same
problem: they vote by what they do (`rules.ProgramRule`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NO_ANSWER, NOT_DRAWN, TOO_LONG, UNDRAWN
from dflash_mcmc.statistics.outcomes import Summed, by_problem, forwards_together, mean_share, prompt_forwards
from dflash_mcmc.statistics.rules import (
    PROGRAM_RULES,
    AdaptiveVote,
    PowerVote,
    ProgramRule,
    VoteRule,
    program_chosen,
    program_rule,
)
from dflash_mcmc.statistics.votes import (
    Votes,
    check_key,
    check_log_q,
    expected_adaptive,
    expected_likeliest,
    expected_majority,
    expected_weighted,
    weighted,
    weights,
)

if TYPE_CHECKING:
    from dflash_mcmc.statistics.outcomes import Combined, CostField, Outcome
    from dflash_mcmc.store.records import Record

_SUMMED: tuple[Summed, ...] = get_args(Summed)


def pass_at_k(correct: int, chains: int, k: int) -> float:
    """Unbiased estimate of the probability that any of k chains is correct (Chen et al. 2021, arXiv 2107.03374).

    `correct` of `chains` chains are correct. The estimate is 1 - C(chains - correct, k) / C(chains, k). It is computed as a
    product, which cannot overflow. Raises ValueError.
    """
    if not (0 <= correct <= chains and 1 <= k <= chains):
        raise ValueError(f"pass_at_k({correct}, {chains}, {k}): need 0 <= correct <= chains and 1 <= k <= chains")
    if chains - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(chains - correct + 1, chains + 1)))


def pass_curve(records: Sequence[Record]) -> list[dict]:
    """One row per k, with k, `pass_at_k`, its interval, n (problems) and left_out (problems with too few chains).

    k is 1, 2, 4, ... and the largest number of chains of a problem. All rows use the problems with that many, so that the
    curve never decreases.
    """
    problems, sizes, left_out = _with_enough(records)
    counts = [(sum(record["verdict"] == "correct" for record in chains), len(chains)) for chains in problems]
    return [{"k": k, **mean_share([pass_at_k(*count, k) for count in counts]).columns("pass_at_k"), "n": len(counts),
             "left_out": left_out} for k in sizes]


def majority(records: Sequence[Record]) -> list[dict]:
    """The vote of each problem.

    A row has problem, answer (the winner's most frequent text; None without a single winner), votes (of a winner), answered
    (number of chains that vote), chains, tied (whether several answers win), winners (their texts) and correct (in [0, 1]).
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


def majority_curve(records: Sequence[Record]) -> list[dict]:
    """One row per k, with k, `accuracy` of a vote of k chains, its interval, n and left_out, as in `pass_curve`.

    The accuracy is the exact mean over all ways to choose k of a problem's chains; nothing is drawn at random.
    """
    problems, sizes, left_out = _with_enough(records)
    expected = [expected_majority(Votes.of(chains).counts(), tuple(sizes)) for chains in problems]
    return [{"k": k, **mean_share([row[column] for row in expected]).columns("accuracy"), "n": len(expected),
             "left_out": left_out} for column, k in enumerate(sizes)]


def weighted_curve(records: Sequence[Record], rule: VoteRule) -> list[dict]:
    """One row per k, with k, `accuracy` of a weighted vote of k chains, its interval, n and left_out, as in `pass_curve`.

    The accuracy is a mean over ways to choose k of a problem's chains (`votes.expected_weighted`). An adaptive vote may
    end before the k-th chain.
    """
    if isinstance(rule, PowerVote):
        check_log_q(records, f"aggregate={rule.name}")
    problems, sizes, left_out = _with_enough(records)
    expected: list[list[Any]] = [expected_weighted(chains, rule, sizes) if isinstance(rule, PowerVote) else
                                 [expected_adaptive(chains, rule, k) for k in sizes] for chains in problems]
    return [{"k": k, **mean_share([row[column].correct for row in expected]).columns("accuracy"), "n": len(expected),
             "left_out": left_out} for column, k in enumerate(sizes)]


def best_of(records: Sequence[Record], key: str, alpha: float | None = None) -> list[dict]:
    """One chain of each problem, chosen by weight. Chains that could not be drawn are never chosen.

    Args:
        key: `log_p` chooses the chain with the largest log p, uniformly if several have it. `power` draws a chain with weights
            exp(alpha * log_p - log_q), normalised over the problem's chains: importance resampling of p^alpha from the
            distribution that the chains were drawn from.
        alpha: exponent for `power`.

    Returns:
        One row per problem, with problem, answer (of the chain with the largest weight), chains, tied (whether several chains
        have the largest weight), effective (effective number of chains, 1 / sum of squared weights) and correct (in [0, 1],
        expected over the draw).

    Raises:
        UserError: for `power` without alpha or log_q. Also for `power` if the sampler chose among draws, as
            Metropolis-Hastings does, because the chains then do not follow the distribution of log_q.
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


def aggregated(records: Sequence[Record], by: str | VoteRule = "majority", alpha: float | None = None,
               chains: int | None = None) -> list[Combined]:
    """One record per problem, combined from several chains, for tables that also have single samples.

    `correct` is the share in [0, 1] that statistics use (see `outcomes.score`). `verdict` is `correct`, `wrong`, `no_answer`
    (no chain has an answer), `not_drawn` or `too_long` (no chain has a text), `tied` (a tied vote with a correct answer among
    the winners) or `expected` (any other share between 0 and 1). Tokens and `share_seconds` are sums over the
    chains, and `token_forwards` is what the engine evaluated for them together. `seconds` is the time of the slowest chain, as
    if all had started together. `num_chains` is the number of chains.
    `log_p` is None, because a vote has no log probability. A weighted vote also has `effective` and `dominated`.

    Args:
        by: `majority`, the rule of a weighted vote, a key of `best_of`, or a `rules.ProgramRule`, which takes the first
            `chains` in their order.
        alpha: exponent for `power`.
        chains: number of chains to combine; None means all. If a problem has more chains, `correct` and costs are means over
            all ways to choose them; for a weighted vote see `weighted.expected_weighted`. If it has fewer chains, it is left
            out. Not allowed for `power`. For an adaptive vote it is the largest number, and `num_chains` the mean of those
            that were needed.

    Raises:
        UserError: in the cases of `best_of` and `weighted`; also if `chains` is less than 1 or is given together with `power`.
    """
    if chains is not None and (by == "power" or chains < 1):
        raise UserError(f"chains: given {chains}; allowed: a whole number >= 1, and null for best of several chains by power")
    kept = [group for group in by_problem(records).values() if chains is None or len(group) >= chains]
    flat = [record for group in kept for record in group]
    if by in PROGRAM_RULES:
        return [_of_programs(group, program_rule(by, flat), chains) for group in kept]
    if isinstance(by, AdaptiveVote):
        return [_stopped(group, by, chains or len(group)) for group in kept]
    rows = weighted(flat, by) if not isinstance(by, str) else majority(flat) if by == "majority" else best_of(flat, by, alpha)
    shares = [1 if chains in (None, len(group)) else chains / len(group) for group in kept]
    return [_aggregate(_of_fewer(row, group, by, chains), group, [share] * len(group))
            for row, group, share in zip(rows, kept, shares, strict=True)]


def _of_programs(group: list[Record], rule: ProgramRule, most: int | None) -> Combined:
    """The record of the program that a rule keeps of the first draws; the cost is that of the draws that it needs."""
    chains = sorted(group, key=lambda record: record["chain"])[:most]
    record, used = program_chosen(chains, rule)
    row = {"problem": record["problem"], "answer": record["answer"], "tied": False, "effective": float(used),
           "dominated": 0.0, "correct": float(record["verdict"] == "correct")}
    combined = _aggregate(row, chains[:used], [1] * used)
    if used < len(chains) and "seconds" in combined:
        combined["seconds"] = sum(each["seconds"] for each in chains[:used])
    return combined


def _stopped(chains: list[Record], rule: AdaptiveVote, most: int) -> Combined:
    """The record of an adaptive vote: costs are those of the chains until its end, which are drawn one after another."""
    result, = majority(chains)
    expected = expected_adaptive(chains, rule, most)
    row = {**result, "answer": None, "tied": False, "correct": expected.correct, "effective": sum(expected.used),
           "dominated": 0.0}
    combined = _aggregate(row, chains, expected.used)
    if "seconds" in combined:
        combined["seconds"] = sum(record["seconds"] * share for record, share in zip(chains, expected.used, strict=True))
    return combined


def affordable(records: Sequence[Outcome], budget: float, cost: CostField = "token_forwards") -> int:
    """The number of chains of a problem that cost no more than the budget: at least 1, and at most all chains of a problem.

    Chains of a problem read its prompt once, so that each chain after the first costs its token-forwards without the prompt's.

    Args:
        records: at least one.
        budget: mean cost per problem of the run to match.
        cost: field of the records that holds the cost.
    """
    most = max(map(len, by_problem(records).values()))
    shared = sum(map(prompt_forwards, records)) if cost == "token_forwards" else 0.0
    further = sum(record[cost] for record in records) - shared
    return most if further <= 0 else max(1, min(most, int((budget * len(records) - shared) / further + 1e-9)))


def _of_fewer(row: dict, chains: list[Record], by: str | VoteRule, num_chains: int | None) -> dict:
    """The row of a problem for a vote over `num_chains` of its chains."""
    if num_chains is None or num_chains == len(chains):
        return row
    if isinstance(by, PowerVote):
        return {**row, "answer": None, "tied": False, **expected_weighted(chains, by, [num_chains])[0]._asdict()}
    correct = (expected_majority(Votes.of(chains).counts(), (num_chains,))[0] if by == "majority"
               else expected_likeliest(chains, num_chains))
    return {**row, "answer": None, "tied": False, "correct": correct}


def _aggregate(row: dict, chains: list[Record], shares: Sequence[float]) -> Combined:
    """The record of a vote. `shares` has the share of the ways to vote that draw each chain."""
    number, alike = round(sum(shares), 9), shares.count(shares[0]) == len(shares)
    num_chains = int(number) if float(number).is_integer() else number
    first, verdicts = chains[0], {record["verdict"] for record in chains}
    if verdicts <= {NO_ANSWER, *UNDRAWN}:
        verdict = next(name for name in (NO_ANSWER, NOT_DRAWN, TOO_LONG) if name in verdicts)
    else:
        verdict = {0.0: "wrong", 1.0: "correct"}.get(row["correct"], "tied" if row["tied"] else "expected")
    combined: Combined = {
        "problem": row["problem"], "chain": 0, "level": first.get("level"), "subject": first.get("subject"),
        "verdict": verdict, "correct": row["correct"], "answer": row["answer"], "gold": first.get("gold"), "log_p": None,
        "num_chains": num_chains, "law_error": max(record.get("law_error", 0.0) for record in chains)}
    if "effective" in row and "dominated" in row:
        combined |= {"effective": row["effective"], "dominated": row["dominated"]}
    for name in _SUMMED:
        if any(name in record for record in chains):  # some fields are there only where they are not 0
            values = [record.get(name, 0) for record in chains]  # whole numbers are summed before they are shared
            combined[name] = sum(values) * shares[0] if alike else float(np.dot(values, shares))
    if "token_forwards" in combined:  # each chain has its prompt, and chains of different draws share it
        read = sum(record["token_forwards"] for record in chains) - forwards_together(chains)
        combined["token_forwards"] -= read if num_chains == len(chains) else read * (num_chains - 1) / (len(chains) - 1)
    if "seconds" in first:
        combined["seconds"] = _expected_longest([record["seconds"] for record in chains], round(num_chains))
    return combined


def _expected_longest(seconds: list[float], num_chains: int) -> float:
    """Expected maximum of `num_chains` of the values, over all ways to choose them."""
    ways = math.comb(len(seconds), num_chains)
    return sum(duration * math.comb(rank, num_chains - 1) for rank, duration in enumerate(sorted(seconds))) / ways


def _with_enough(records: Sequence[Record]) -> tuple[list[list[Record]], list[int], int]:
    """(chains, ks, left out): the problems with the most chains, the numbers of a curve, and the number of other problems."""
    problems = list(by_problem(records).values())
    most = max(map(len, problems), default=0)
    kept = [chains for chains in problems if len(chains) == most]
    return kept, sorted({2**power for power in range(most.bit_length())} | {most} - {0}), len(problems) - len(kept)
