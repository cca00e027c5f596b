"""Several chains per problem: pass@k, majority votes, best of N, one combined record per problem, and how the chains mix.

A vote is an extracted answer. Two answers are the same vote if their normalised strings are equal
(`grading.math.string_rule.normal_form`). Equivalent answers that are written differently are different votes, whether they are
right or wrong: merging votes with the grader would use the gold answer, and would merge right answers only. An answer is
as correct as its most frequent text. A sample without an answer does not vote. A tied vote counts as the expected
value of a uniform draw among the winners; if no sample votes, the problem is wrong. Different programs can solve the same
problem: they vote by what they do (`votes.ProgramRule`).

Mixing is read from the traces of ordinary records. R-hat is the rank-normalised split R-hat and the effective sample size
(ESS) the bulk ESS of log p: Vehtari, Gelman, Simpson, Carpenter & Buerkner 2021 (arXiv 1903.08008), as arviz-stats computes
them. For chains that hardly move these numbers do not measure mixing: if all chains stay at one value, the ESS equals the
number of draws. The ESS is therefore limited: a chain adds at most the number of states that it visits, a stuck one nothing.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.verdicts import NO_ANSWER, NOT_DRAWN, TOO_LONG, UNDRAWN
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics import estimates, votes
from dflash_mcmc.store.records import Record

LEAST_STEPS, LEAST_CHAINS = 4, 2
"""Fewest steps and chains for R-hat. It splits each chain into two halves of at least two steps."""
LEAST_STEPS_OF_ESS = 20
"""Smallest number of steps for ESS.

The estimator sums autocorrelations of the half chains in pairs of lags. Below 10 steps there is no pair, and the result is a
constant above the number of draws. At 10 steps there is one pair: four autoregressive chains (coefficient 0.8), whose true ESS
is 0.11 of the draws, get 0.40 on average. At 20 steps they get 0.19.
"""
_ROUNDING = 1e7
"""A larger R-hat is treated as infinite, because its denominator is only rounding error."""
_DRAWS = 200
WINDOWS = ("all", "last half", "last stage")
"""Windows of steps.

All steps include those in which the state still grows. The last half leaves out this warm-up. The last stage is the only
window in which the target is always the same.
"""


_FIELDS = {"block", "length", "proposal_length", "log_p", "decision"}
"""What this module reads of a step; see `kernel.trace_entry`."""


class StepChain(NamedTuple):
    """The steps of a chain, arrays of shape (steps,)."""

    problem: str
    block: np.ndarray
    """The stage of each step, int64."""
    log_p: np.ndarray
    """Log p of the state after each step in nats, float64.

    It changes only if the chain moves, or between stages as the state grows. If the proposal repeats the state, the previous
    value is kept, because a recomputed one would differ by rounding.
    """
    moved: np.ndarray
    """Whether the step changed the state, bool."""
    accepted: np.ndarray
    """Whether the proposal was accepted, which may be equal to the state, bool."""


def chain_of(record: Mapping[str, Any]) -> StepChain | None:
    """The steps of a record; None if its trace is not that of one Metropolis-Hastings chain."""
    trace = record.get("trace") or ()
    if not trace or any("rung" in entry or not entry.keys() >= _FIELDS for entry in trace):
        return None
    block, length, proposed, log_p = (np.array([entry[name] for entry in trace])
                                      for name in ("block", "length", "proposal_length", "log_p"))
    moved = np.array([entry["decision"] == "accept" for entry in trace])
    accepted = moved | np.array([entry["decision"] == "identical" for entry in trace])
    after = np.where(moved, proposed, length)
    same = np.concatenate([[False], ~moved[1:] & (length[1:] == after[:-1])])
    kept = np.maximum.accumulate(np.where(same, 0, np.arange(len(trace))))
    return StepChain(record["problem"], block, log_p.astype(float)[kept], moved, accepted)


class Window(NamedTuple):
    """Steps of parallel chains, each array (chains, steps): log p after each step (float64), and what it did (bool)."""

    log_p: np.ndarray
    moved: np.ndarray
    accepted: np.ndarray

    @property
    def stuck(self) -> np.ndarray:
        """Whether a chain's state never changes after the first step of the window, bool (chains,)."""
        return self.moved[:, 1:].sum(axis=1) == 0


def window(chains: Sequence[StepChain], name: str) -> Window:
    """One of `WINDOWS`. If chains differ in length, each contributes as many of its last steps as the shortest one has."""
    kept = [chain.block == chain.block[-1] if name == "last stage" else np.ones(len(chain.block), bool) for chain in chains]
    length = min(int(mask.sum()) for mask in kept)
    length -= length // 2 if name == "last half" else 0

    def rows(column: str) -> np.ndarray:
        return np.stack([(own := getattr(chain, column)[mask])[len(own) - length :]
                         for chain, mask in zip(chains, kept, strict=True)])

    return Window(rows("log_p"), rows("moved"), rows("accepted"))


def rhat(steps: Window) -> float | None:
    """R-hat. None with fewer than two chains or four steps, and if all half chains have the same value.

    It is infinite if half chains differ but do not vary within themselves. With an odd number of steps, the middle one is in
    neither half.
    """
    chains, length = steps.log_p.shape
    value = _rhat(steps.log_p) if chains >= LEAST_CHAINS and length >= LEAST_STEPS else math.nan
    return None if math.isnan(value) else value


@cache
def _estimators() -> Any:
    from arviz_stats.base import array_stats  # late: the import takes seconds

    return array_stats


def _rhat(log_p: np.ndarray) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):  # warnings for constant half chains
        value = float(_estimators().rhat(log_p, chain_axis=0, draw_axis=1, method="rank"))
    return math.inf if value > _ROUNDING else value


def ess(steps: Window) -> float | None:
    """ESS of all chains together, at most the number of states that the moving chains visit; None with too few steps.

    A state counts as one draw, regardless of how many steps it is kept. The limit also keeps the ESS of antithetic chains at
    or below the number of draws. Stuck chains add nothing, because their only state is the one with which they enter the
    window. Without the limit, many chains with a single move among them would have an ESS of all their draws, because log p
    hardly varies. A run would then look better the less its chains move.
    """
    if steps.log_p.shape[1] < LEAST_STEPS_OF_ESS:
        return None
    moves = steps.moved[:, 1:].sum(axis=1)
    states = float((moves + 1)[moves > 0].sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return min(float(_estimators().ess(steps.log_p, chain_axis=0, draw_axis=1, method="bulk")), states)


def autocorrelation(log_p: np.ndarray) -> np.ndarray:
    """Autocorrelation at lags 0, 1, ... of a chain that is not stuck, float64 (steps,), from its log p.

    The divisor is the sum of squares around the chain's own mean. For short chains the result is too small by about 1 / steps.
    """
    return np.asarray(_estimators().autocorr(log_p), float)


def independent_autocorrelation(steps: int, lag: int) -> float:
    """The expected autocorrelation of independent draws.

    It is negative: for deviations from their own mean, the products of all ordered pairs of different draws sum to minus the
    sum of squares.
    """
    return -(steps - lag) / (steps * (steps - 1))


@cache
def independent_rhats(chains: int, steps: int) -> np.ndarray:
    """R-hat of 200 sets of independent draws, float64 (200,). They show perfect mixing in equally short chains."""
    key = Key(0).fold_in("independent chains", chains, steps)
    return np.array([_rhat(draws) for draws in key.uniforms(0, _DRAWS * chains * steps).reshape(_DRAWS, chains, steps)])


_SUMMED: tuple[estimates.Summed, ...] = get_args(estimates.Summed)


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
    return [{"k": k, **estimates.mean_share([pass_at_k(*count, k) for count in counts]).columns("pass_at_k"), "n": len(counts),
             "left_out": left_out} for k in sizes]


def majority(records: Sequence[Record]) -> list[dict]:
    """The vote of each problem.

    A row has problem, answer (the winner's most frequent text; None without a single winner), tied (whether several answers
    win) and correct (in [0, 1]).
    """
    rows = []
    for problem, chains in estimates.by_problem(records).items():
        candidates = votes.Votes.of(chains).candidates
        most = max((each.number for each in candidates), default=0)
        winners = [each for each in candidates if each.number == most]
        rows.append({"problem": problem, "answer": winners[0].answer if len(winners) == 1 else None, "tied": len(winners) > 1,
                     "correct": sum(winner.correct for winner in winners) / max(1, len(winners))})
    return rows


def vote_curve(records: Sequence[Record], rule: votes.VoteRule | None = None) -> list[dict]:
    """One row per k, with k, `accuracy` of a vote of k chains, its interval, n and left_out, as in `pass_curve`.

    The accuracy is a mean over the ways to choose k of a problem's chains: for the majority vote the exact mean over all ways,
    for a weighted one see `votes.expected_weighted`. An adaptive vote takes the first k, and may end before the k-th.

    Args:
        rule: the rule of a weighted vote; None for the majority vote.
    """
    if isinstance(rule, votes.PowerVote):
        votes.check_log_q(records, f"aggregate={rule.name}")
    problems, sizes, left_out = _with_enough(records)

    def expected(chains: list[Record]) -> Sequence[float]:
        if rule is None:
            return votes.expected_majority(votes.Votes.of(chains).counts(), tuple(sizes))
        if isinstance(rule, votes.PowerVote):
            return [of.correct for of in votes.expected_weighted(chains, rule, sizes)]
        return [votes.adaptive(chains, rule, k)[0] for k in sizes]

    of_problems = [expected(chains) for chains in problems]
    return [{"k": k, **estimates.mean_share([of[column] for of in of_problems]).columns("accuracy"), "n": len(problems),
             "left_out": left_out} for column, k in enumerate(sizes)]


def aggregated(records: Sequence[Record], by: str | votes.VoteRule = "majority",
               chains: int | None = None) -> list[estimates.Combined]:
    """One record per problem, combined from several chains, for tables that also have single samples.

    `correct` is the share in [0, 1] that statistics use (see `estimates.score`). `verdict` is `correct`, `wrong`, `no_answer`
    (no chain has an answer), `not_drawn` or `too_long` (no chain has a text) or `expected` (a share between 0 and 1). Tokens
    and `share_seconds` are sums over the chains, and `token_forwards` is what the engine evaluated for them together.
    `seconds` is the time of the slowest chain, as if all had started together; chains that are drawn until a vote ends take
    the sum of their times. `num_chains` is the number of chains. `log_p` is None, because a vote has no log probability. A
    weighted vote also has `effective` and `dominated`.

    Args:
        by: `majority`, `log_p` (the chain with the largest log p, uniformly if several have it), the rule of a weighted vote,
            or a `votes.ProgramRule`, which takes the first `chains` in their order.
        chains: number of chains to combine; None means all. If a problem has more chains, `correct` and costs are means over
            all ways to choose them; for a weighted vote see `votes.expected_weighted`. If it has fewer chains, it is left
            out. An adaptive vote takes the first ones, and `num_chains` is the number of those that it needed.

    Raises:
        UserError: for less than one chain, for records of programs that were not run on examples, and for a weighted vote if a
            chain has no log q or is not an independent draw.
    """
    if chains is not None and chains < 1:
        raise UserError(f"chains: given {chains}; allowed: a whole number >= 1, or null")
    kept = [group for group in estimates.by_problem(records).values() if chains is None or len(group) >= chains]
    flat = [record for group in kept for record in group]
    if isinstance(by, votes.PowerVote):
        votes.check_log_q(flat, f"aggregate={by.name}")
    if by in votes.PROGRAM_RULES and flat and not votes.has_examples(flat):
        raise UserError(f"aggregate={by}: given records without what programs do on examples; allowed: those of a run with "
                        "grader.examples=true, or of dflash_mcmc.regrade with it")
    return [_combined(group, by, chains or len(group)) for group in kept]


def _combined(chains: list[Record], by: str | votes.VoteRule, k: int) -> estimates.Combined:
    """The record of a problem for a vote of k of its chains."""
    weighed, one_by_one = dict[str, float](), False
    if isinstance(by, votes.PowerVote):
        correct, weighed["effective"], weighed["dominated"] = votes.expected_weighted(chains, by, [k])[0]
    # The first chains, until one or the vote is good enough
    elif isinstance(by, votes.AdaptiveVote) or by in votes.PROGRAM_RULES:
        draws = sorted(chains, key=lambda record: record["chain"])[:k]
        if isinstance(by, votes.AdaptiveVote):
            (correct, used), one_by_one = votes.adaptive(draws, by, k), True
        else:
            record, used = votes.program_chosen(draws, cast(votes.ProgramRule, by))
            correct, one_by_one = float(record["verdict"] == "correct"), used < k
        chains, k, weighed = draws[:used], used, {"effective": float(used), "dominated": 0.0}
    elif by == "log_p":
        correct = round(votes.expected_likeliest(chains, k), 12)
    elif by == "majority":
        correct = (majority(chains)[0]["correct"] if k == len(chains) else
                   votes.expected_majority(votes.Votes.of(chains).counts(), (k,))[0])
    else:
        raise ValueError(f"by: given {by!r}; allowed: majority, log_p, a rule of weighted votes, "
                         f"{', '.join(votes.PROGRAM_RULES)}")
    share = 1 if k == len(chains) else k / len(chains)  # of the ways to choose k chains that have a certain one
    first, verdicts = chains[0], {record["verdict"] for record in chains}
    if verdicts <= {NO_ANSWER, *UNDRAWN}:
        verdict = next(name for name in (NO_ANSWER, NOT_DRAWN, TOO_LONG) if name in verdicts)
    else:
        verdict = {0.0: "wrong", 1.0: "correct"}.get(correct, "expected")
    combined: estimates.Combined = {
        "problem": first["problem"], "chain": 0, "level": first.get("level"), "subject": first.get("subject"),
        "verdict": verdict, "correct": correct, "gold": first.get("gold"), "log_p": None, "num_chains": k,
        "law_error": max(record.get("law_error", 0.0) for record in chains), **weighed}  # type: ignore[typeddict-item]
    for name in _SUMMED:
        if any(name in record for record in chains):  # some fields are there only where they are not 0
            combined[name] = sum(record.get(name, 0) for record in chains) * share
    if "token_forwards" in combined:  # each chain has its prompt, and chains of different draws share it
        read = sum(record["token_forwards"] for record in chains) - estimates.forwards_together(chains)
        combined["token_forwards"] -= read if k == len(chains) else read * (k - 1) / (len(chains) - 1)
    if "seconds" in first and one_by_one:
        combined["seconds"] = sum(record["seconds"] for record in chains)
    elif "seconds" in first:  # the expected maximum of the chains, over all ways to choose them
        seconds = sorted(record["seconds"] for record in chains)
        combined["seconds"] = sum(duration * math.comb(rank, k - 1) for rank, duration in enumerate(seconds)) / math.comb(
            len(seconds), k)
    return combined


def affordable(records: Sequence[estimates.Outcome], budget: float, cost: estimates.CostField = "token_forwards") -> int:
    """The number of chains of a problem that cost no more than the budget: at least 1, and at most all chains of a problem.

    Chains of a problem read its prompt once, so that each chain after the first costs its token-forwards without the prompt's.

    Args:
        records: at least one.
        budget: mean cost per problem of the run to match.
        cost: field of the records that holds the cost.
    """
    most = max(map(len, estimates.by_problem(records).values()))
    shared = sum(map(estimates.prompt_forwards, records)) if cost == "token_forwards" else 0.0
    further = sum(record[cost] for record in records) - shared
    return most if further <= 0 else max(1, min(most, int((budget * len(records) - shared) / further + 1e-9)))


def _with_enough(records: Sequence[Record]) -> tuple[list[list[Record]], list[int], int]:
    """(chains, ks, left out): the problems with the most chains, the numbers of a curve, and the number of other problems."""
    problems = list(estimates.by_problem(records).values())
    most = max(map(len, problems), default=0)
    kept = [chains for chains in problems if len(chains) == most]
    return kept, sorted({2**power for power in range(most.bit_length())} | {most} - {0}), len(problems) - len(kept)
