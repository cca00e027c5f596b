"""Outcomes of samples by problem, and numbers with their intervals.

Observations come in clusters: the tokens of one problem are not independent, but problems are. The bootstrap therefore
resamples whole clusters (Field & Welsh 2007, "Bootstrapping clustered data"; for evaluations Miller 2024, arXiv 2411.00640). A
resample is a count for each cluster, so that a statistic can be computed for all resamples at once from weighted observations.
The input of paired statistics is, for each problem, the share of its chains that are correct.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar, cast, final

import numpy as np
from numpy.typing import ArrayLike

from dflash_mcmc.store.records import Record
from dflash_mcmc.types import Cost

CONFIDENCE = 0.95
_RESAMPLES = 1000
_FEW = 10
"""Up to this number of clusters, a caution goes with the intervals."""
_VALUES_AT_ONCE = 4_000_000
_ROWS = 50
"""Resamples that are drawn or multiplied at once."""


def cautions(numbers: Iterable[int]) -> list[str]:
    """Lines for bootstrap intervals over few problems, which are too narrow: one for each number of problems, but for 1.

    The bootstrap's variance is too small by (n - 1) / n, and its percentiles are normal instead of Student's: Hesterberg 2015,
    "What Teachers Should Know About the Bootstrap", section 4.
    """
    return [f"caution: some intervals are a bootstrap over {number} problems, which covers less than 95 %; more than "
            f"{_FEW} problems are enough" for number in dict.fromkeys(numbers) if 2 <= number <= _FEW]


class IntervalEstimate(NamedTuple):
    """A number with its 95 % interval and its number of observations."""

    value: float | None = None
    """None without observations."""
    low: float | None = None
    """None if there are fewer than two clusters."""
    high: float | None = None
    n: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any], name: str) -> "IntervalEstimate":
        """The estimate in the columns of a row that `columns` gives; n is 0."""
        return cls(row[name], row[f"{name}_low"], row[f"{name}_high"])

    def mapped(self, function: Callable[[float], float]) -> "IntervalEstimate":
        """The estimate with a function applied to its value and to both ends of its interval."""
        value, low, high = (None if number is None else function(number) for number in (self.value, self.low, self.high))
        return self._replace(value=value, low=low, high=high)

    @property
    def known(self) -> float:
        """The value of an estimate that has observations. Raises ValueError without them."""
        if self.value is None:
            raise ValueError("an estimate without observations has no value")
        return self.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; None without an interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def columns(self, name: str) -> dict[str, float | None]:
        """`name`, `name_low` and `name_high` of a row; a table prints them as one column."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class Clusters:
    """Observations grouped into clusters, such as the tokens of each problem.

    Args:
        of: the cluster of each observation.
    """

    def __init__(self, of: Sequence[Hashable]):
        names = list(dict.fromkeys(of))
        index_of = {name: index for index, name in enumerate(names)}
        self._of, self.number, self.size = np.array([index_of[name] for name in of], dtype=np.int64), len(names), len(of)
        # The resamples depend only on the number of clusters, so paired columns of a table use the same resamples.
        self._counts = _resamples(self.number)

    def among(self, kept: np.ndarray) -> "Clusters":
        """The clusters of the selected observations only; `kept` is bool (size,)."""
        return Clusters(self._of[kept].tolist())

    def mean(self, values: ArrayLike, among: ArrayLike | None = None) -> IntervalEstimate:
        """Mean of all values, or of those selected by `among`. For bools it is the share of true values."""
        kept = np.ones(self.size, bool) if among is None else np.asarray(among, bool)
        return self.ratio(np.where(kept, np.asarray(values, np.float64), 0.0), kept)

    def ratio(self, above: ArrayLike, below: ArrayLike) -> IntervalEstimate:
        """The sum of `above` divided by the sum of `below`. n is the sum of `below`, rounded.

        There is no interval if fewer than two clusters have a part in `below`: their resamples are all the same ratio.
        """
        sums = [np.bincount(self._of, np.asarray(part, np.float64), self.number) for part in (above, below)]
        total = sums[1].sum()
        if total == 0:
            return IntervalEstimate()
        counts = self._counts if np.count_nonzero(sums[1]) > 1 else self._counts[:0]
        return self._estimate(sums[0].sum() / total, divided(*(_products(counts, part) for part in sums)), round(total))

    def quantiles(self, values: ArrayLike, levels: Sequence[float]) -> list[IntervalEstimate]:
        """The quantile at each level: the smallest value such that at least this share of the observations is not above it."""
        observed = np.asarray(values, np.float64)
        if not self.size:
            return [IntervalEstimate()] * len(levels)
        order = np.argsort(observed, kind="stable")
        ordered, of = observed[order], self._of[order]

        def pick(weights: np.ndarray) -> np.ndarray:
            upto = np.cumsum(weights, axis=1)
            return np.stack([ordered[np.argmax(upto >= level * upto[:, -1:] - 1e-9, axis=1)] for level in levels], axis=1)

        whole = pick(np.ones((1, self.size)))[0]
        resampled = self._in_pieces(lambda counts: pick(counts[:, of]), len(levels))
        return [self._estimate(value, column, self.size) for value, column in zip(whole, resampled.T, strict=True)]

    def statistic(self, function: Callable[[np.ndarray], np.ndarray]) -> IntervalEstimate:
        """Any other statistic. `function` maps weights (resamples, observations) to values (resamples,); nan is undefined."""
        value = float(function(np.ones((1, self.size)))[0]) if self.size else np.nan
        if np.isnan(value):
            return IntervalEstimate(None, None, None, self.size)
        resampled = self._in_pieces(lambda counts: function(counts[:, self._of])[:, None], 1)
        return self._estimate(value, resampled[:, 0], self.size)

    def _in_pieces(self, function: Callable[[np.ndarray], np.ndarray], width: int) -> np.ndarray:
        """Applies a function to all resamples, in pieces that fit in memory. Returns (resamples, width)."""
        step = max(1, _VALUES_AT_ONCE // max(1, self.size))
        pieces = [function(self._counts[start : start + step].astype(np.int64)) for start in range(0, len(self._counts), step)]
        return np.concatenate(pieces) if pieces else np.empty((0, width))

    def _estimate(self, value: float, resampled: np.ndarray, n: int) -> IntervalEstimate:
        resampled = resampled[~np.isnan(resampled)]
        if not len(resampled):
            return IntervalEstimate(float(value), None, None, n)
        low, high = np.quantile(resampled, [(1.0 - CONFIDENCE) / 2.0, (1.0 + CONFIDENCE) / 2.0])
        return IntervalEstimate(float(value), float(low), float(high), n)


@lru_cache(maxsize=64)
def _resamples(num_clusters: int) -> np.ndarray:
    """The count of each cluster in each resample, uint8 (resamples, num_clusters); no resamples for a single cluster.

    A count is above 255 with a probability below 1e-500, and 100,000 clusters take 100 MB.
    """
    if num_clusters < 2:
        return np.empty((0, num_clusters), np.uint8)
    rng, shares = np.random.default_rng(0), np.full(num_clusters, 1.0 / num_clusters)
    pieces = [rng.multinomial(num_clusters, shares, rows).astype(np.uint8) for rows in [_ROWS] * (_RESAMPLES // _ROWS)]
    return np.concatenate(pieces)


def _products(counts: np.ndarray, part: np.ndarray) -> np.ndarray:
    """`counts @ part`, some rows at a time: a whole array of float64 does not fit where there are many clusters."""
    return np.concatenate([counts[start : start + _ROWS].astype(np.float64) @ part
                           for start in range(0, len(counts), _ROWS)] or [np.empty(0)])


def divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The quotients; NaN where the divisor is 0."""
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)


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
