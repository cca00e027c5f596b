"""Outcomes of samples by problem, and accuracies with their intervals.

The input of paired statistics: for each problem, the share of its chains that are correct.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple, NotRequired, TypedDict, TypeVar, cast, final

import numpy as np
from numpy.typing import ArrayLike

from dflash_mcmc.statistics.intervals import CONFIDENCE, Clusters, IntervalEstimate
from dflash_mcmc.store.records import Record
from dflash_mcmc.types import Cost

Summed = Literal["token_forwards", "target_forwards", "tokens_drawn", "tokens_skipped", "blocks_drafted", "tokens_drafted",
                 "tokens_kept", "blocks_verified", "tokens_verified", "share_seconds", "num_tokens", "proposals", "accepted",
                 "moved", "abandoned"]
"""The fields of records that are summed over the chains of a problem."""
CostField = Literal[Summed, "seconds"]
"""The fields of records that can be a cost. `seconds` is the time of the slowest chain, since chains run in the same batch."""


@final
class Combined(TypedDict):
    """One record per problem, combined from several chains (`chains.aggregated`)."""

    problem: str
    chain: int
    """Always 0."""
    level: int | str | None
    subject: str | None
    verdict: str
    """One of `grading.verdicts.VERDICTS`, or `expected`."""
    correct: float
    """The share in [0, 1] that statistics use."""
    gold: str | None
    log_p: None
    """A vote has no log probability."""
    num_chains: int
    """The number that was drawn, for an adaptive vote."""
    law_error: float
    """The largest value over the chains."""
    effective: NotRequired[float]
    """Effective number of chains of a weighted vote."""
    dominated: NotRequired[float]
    """1 if one chain has more than half of the weight of a weighted vote, else 0; a mean for a vote over fewer chains."""
    token_forwards: NotRequired[float]
    """What the engine evaluated for the chains together (`forwards_together`). Other fields in `Summed` are sums over the
    chains. A field that the chains lack is missing."""
    target_forwards: NotRequired[float]
    tokens_drawn: NotRequired[float]
    tokens_skipped: NotRequired[float]
    blocks_drafted: NotRequired[float]
    tokens_drafted: NotRequired[float]
    tokens_kept: NotRequired[float]
    blocks_verified: NotRequired[float]
    tokens_verified: NotRequired[float]
    share_seconds: NotRequired[float]
    num_tokens: NotRequired[float]
    proposals: NotRequired[float]
    accepted: NotRequired[float]
    moved: NotRequired[float]
    abandoned: NotRequired[float]
    seconds: NotRequired[float]
    """Seconds of the slowest chain."""


Outcome = Record | Combined
_R = TypeVar("_R", bound=Outcome)


class PairedOutcomes(NamedTuple):
    """The outcomes of a run, problem by problem."""

    problems: tuple[str, ...]
    """Distinct ids."""
    correct: np.ndarray
    """Float64 (problems,): the share of each problem's chains that is correct."""
    chains: np.ndarray
    """Int64 (problems,): the number of recorded chains of each problem."""

    @property
    def single(self) -> bool:
        """Whether each problem has one chain that is either correct or wrong, which excludes tied votes."""
        return bool((self.chains == 1).all() and np.isin(self.correct, (0.0, 1.0)).all())


def score(record: Outcome) -> float:
    """1 for a correct record, 0 for any other. For a record that is combined from several chains, its `correct` in [0, 1]."""
    return float(record["correct"]) if "correct" in record else float(record["verdict"] == "correct")


def by_problem(records: Sequence[_R]) -> dict[str, list[_R]]:
    """The records of each problem; problems are in order of first appearance."""
    groups: dict[str, list[_R]] = defaultdict(list)
    for record in records:
        groups[record["problem"]].append(record)
    return dict(groups)


def forwards_together(records: Sequence[Outcome]) -> float:
    """Token-forwards that the engine evaluated for these records: the prompt of a problem once for all of its chains."""
    return sum(Cost.together([(record["token_forwards"], prompt_forwards(record)) for record in chains])
               for chains in by_problem(records).values())


def prompt_forwards(record: Outcome) -> int:
    """The part of a record's token-forwards that the chains of its problem share; 0 for one that is combined already."""
    return cast("int", record.get("prompt_forwards", 0))


def outcomes(records: Sequence[Outcome]) -> PairedOutcomes:
    """The outcomes of a run's records; problems are in order of first appearance."""
    scores = {problem: [score(record) for record in chains] for problem, chains in by_problem(records).items()}
    return PairedOutcomes(tuple(scores), np.array([sum(group) / len(group) for group in scores.values()], np.float64),
                    np.array([len(group) for group in scores.values()], np.int64))


def restricted(of: PairedOutcomes, problems: Sequence[str]) -> PairedOutcomes:
    """The outcomes of these problems, in this order. Raises KeyError for an unknown problem."""
    index_of = {problem: index for index, problem in enumerate(of.problems)}
    chosen = np.array([index_of[problem] for problem in problems], dtype=np.int64)
    return PairedOutcomes(tuple(problems), of.correct[chosen], of.chains[chosen])


def aligned(a: PairedOutcomes, b: PairedOutcomes) -> tuple[PairedOutcomes, PairedOutcomes, int]:
    """(a, b, left out): both runs on their common problems, in the order of `a`, and the number of problems left out."""
    problems_of_b = set(b.problems)
    shared = [problem for problem in a.problems if problem in problems_of_b]
    return restricted(a, shared), restricted(b, shared), len(a.problems) + len(b.problems) - 2 * len(shared)


def wilson(correct: float, total: int) -> IntervalEstimate:
    """A share of independent samples with its score interval (Wilson 1927); values are None if `total` is 0.

    The formula is here because scipy.stats takes most of a second to import, at the end of every run.
    """
    if not total:
        return IntervalEstimate()
    share, z = correct / total, NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (correct + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * math.sqrt(total * share * (1 - share) + z * z / 4)
    return IntervalEstimate(share, 0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half, total)


def accuracy(records: Sequence[Outcome]) -> IntervalEstimate:
    """Share of correct samples; n is the number of samples. See `accuracy_of`."""
    return accuracy_of(outcomes(records))


def accuracy_of(of: PairedOutcomes) -> IntervalEstimate:
    """Share of correct samples, with Wilson's interval for one chain per problem, else with a bootstrap over problems.

    Samples of one problem are not independent, so the bootstrap resamples problems (Miller 2024, arXiv 2411.00640). Chains of
    a single problem say nothing about other problems. The interval of a single problem is therefore [0, 1].
    """
    if of.single:
        return wilson(round(of.correct.sum()), len(of.problems))
    order = np.argsort(of.problems)  # the interval must not depend on the order of the records
    return _over_problems(of.correct[order], of.chains[order])


def mean_share(shares: ArrayLike) -> IntervalEstimate:
    """Mean of one share in [0, 1] per problem, with a bootstrap over problems; n is the number of problems."""
    values = np.asarray(shares, np.float64)
    return _over_problems(values, np.ones(len(values), np.int64))


def _over_problems(shares: np.ndarray, weights: np.ndarray) -> IntervalEstimate:
    if not len(shares):
        return IntervalEstimate()
    mean, samples = float((shares * weights).sum() / weights.sum()), int(weights.sum())
    if len(shares) == 1:
        return IntervalEstimate(mean, 0.0, 1.0, samples)
    if np.ptp(shares) < 1e-12:  # the bootstrap cannot vary equal shares, so Wilson's interval over problems is used
        return wilson(mean * len(shares), len(shares))._replace(n=samples)
    return Clusters(range(len(shares))).ratio(shares * weights, weights)
