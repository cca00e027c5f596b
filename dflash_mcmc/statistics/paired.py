"""Paired comparison of two runs: the problems that only one run solves, the difference, its interval and its significance.

Every comparison is paired. Problems differ in difficulty far more than methods do, and a paired test does not count these
differences as noise (Miller 2024, arXiv 2411.00640).

Also the interaction of two factors, and tests that two runs have one law. In a paired permutation test the members of a pair
have the same law under the null hypothesis, so they can be swapped. Whole generations are swapped, so the tokens of a
generation may depend on each other.

Then what an experiment resolves. The variance of a problem's difference has two parts: of the problems, whose true differences
are not equal, and of the chains, each of which is one draw. More problems divide both parts, and more chains the second alone.
The formula is the normal one, of a paired t test with many problems.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.estimates import CONFIDENCE, IntervalEstimate, PairedOutcomes, accuracy_of, mean_share

LEVEL = 0.05
"""A difference with a larger p-value is a tie."""
MCNEMAR, PERMUTATION = "exact McNemar", "paired permutation"
_ERRORS = NormalDist().inv_cdf(1.0 - LEVEL / 2.0) + NormalDist().inv_cdf(0.8)
"""How many standard errors a difference is away from zero if a test at `LEVEL` detects it with power 0.8."""
_RESAMPLES, _BATCH, _NORMAL = 9999, 250, 2000
"""Number of sign flips drawn; if at most 13 problems differ, all sign flips are enumerated."""


class Paired(NamedTuple):
    """The comparison of run `a` with run `b`. The first four fields sum to the number of problems.

    With several chains per problem, these fields are expected numbers for one random chain of each run.
    """

    both: float
    only_a: float
    only_b: float
    neither: float
    difference: IntervalEstimate
    """Accuracy of `a` minus accuracy of `b`. Each problem counts once, and n is the number of problems.

    The interval is that of `mean_difference`. The verdict follows the exact test, whatever the interval.
    """
    p_value: float
    """Two-sided p-value, not adjusted for the number of comparisons: see `holm`."""
    test: str
    """`exact McNemar` if each problem has one chain in both runs, else `paired permutation`."""
    verdict: str
    """`a better`, `b better` or `tie`."""


def compare(a: PairedOutcomes, b: PairedOutcomes) -> Paired:
    """Compares two runs. Raises ValueError if they are not on the same problems in the same order, or have no problems."""
    if a.problems != b.problems:
        raise ValueError("the runs are not on the same problems in the same order: see estimates.aligned")
    if not a.problems:
        raise ValueError("the runs have no problem in common, so they cannot be compared")
    single = a.single and b.single
    both, only_a = float((a.correct * b.correct).sum()), float((a.correct * (1.0 - b.correct)).sum())
    only_b, neither = float(((1.0 - a.correct) * b.correct).sum()), float(((1.0 - a.correct) * (1.0 - b.correct)).sum())
    difference = mean_difference(a.correct - b.correct, int(min(a.chains.min(), b.chains.min())))
    if single:  # the exact McNemar test (1947): a binomial test on the problems that only one of the two runs solves
        from scipy.special import bdtr

        p_value = min(1.0, 2.0 * float(bdtr(min(only_a, only_b), int(only_a + only_b), 0.5)))
    else:
        p_value = sign_flip(a.correct - b.correct)
    return Paired(both, only_a, only_b, neither, difference, p_value, MCNEMAR if single else PERMUTATION,
                  verdict(difference.known, p_value))


def verdict(difference: float, p_value: float | None) -> str:
    """`a better` or `b better` if the p-value, adjusted or not, is at most 0.05; else `tie`."""
    if p_value is None or p_value > LEVEL or difference == 0.0:
        return "tie"
    return "a better" if difference > 0.0 else "b better"


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values, adjusted for all comparisons of a table (Holm 1979). A row without a test has None and keeps it."""
    tested = sorted((p_value, row) for row, p_value in enumerate(p_values) if p_value is not None)
    adjusted, largest = list[float | None]([None] * len(p_values)), 0.0
    for rank, (p_value, row) in enumerate(tested):
        adjusted[row] = largest = min(1.0, max(largest, p_value * (len(tested) - rank)))
    return adjusted


def sign_flip(differences: ArrayLike) -> float:
    """Two-sided p-value of a mean difference over problems if both signs of each difference are equally likely (Fisher 1935).

    All sign flips are enumerated if at most 13 problems differ, else 9,999 are drawn with a fixed seed. If more than 2,000
    problems differ, p is that of the normal distribution with the flips' variance. Its error is of the order of 1/problems, as
    the flips are symmetric, and below the noise of 9,999 draws.
    """
    differing = np.asarray(differences, np.float64)
    differing = differing[np.abs(differing) > 1e-12]  # the sign of a zero has no effect
    if len(differing) < 2:
        return 1.0  # both signs of a single difference are equally far from zero
    if len(differing) > _NORMAL:
        return math.erfc(abs(differing.sum()) / math.sqrt(2.0 * (differing @ differing)))
    total, drawn = differing.sum(), 2 ** len(differing) > _RESAMPLES
    if drawn:
        rng, pair = np.random.default_rng(0), np.tile([0, 1], (_BATCH, len(differing), 1))
        flips = (rng.permuted(pair, axis=-1)[..., 0] for _ in range(0, _RESAMPLES, _BATCH))
    else:
        flips = (np.arange(2 ** len(differing))[:, None] >> np.arange(len(differing)) & 1 for _ in range(1))
    sums = np.concatenate([(1.0 - 2.0 * flipped) @ differing for flipped in flips])[:_RESAMPLES]
    equal = 1e-12 * np.abs(differing).sum()  # sums of the same differences in another order
    below, above = int((sums <= total + equal).sum()), int((sums >= total - equal).sum())
    return min(1.0, 2.0 * (min(below, above) + drawn) / (len(sums) + drawn))


def mean_difference(differences: np.ndarray, chains: int, widest: float = 1.0) -> IntervalEstimate:
    """Mean of one difference per problem, float64 (problems,), each in [-widest, widest], with an interval over problems.

    The interval is Student's, of the differences and of two more values, 1/sqrt(chains) and -1/sqrt(chains). With one chain
    per problem they add one problem to each of the two cells in which the runs differ, as in the adjusted Wald interval of
    Bonett & Price 2012, which has a normal quantile. A bootstrap covers less than its level with few problems.

    Args:
        chains: smallest number of chains of a problem in a run.
    """
    from scipy.special import stdtrit

    mean, num_problems = float(differences.mean()), len(differences)
    if num_problems == 1:
        return IntervalEstimate(mean, -widest, widest, 1)
    if np.ptp(differences) > 1e-12:
        added = np.append(differences, [chains**-0.5, -(chains**-0.5)])
        half = float(stdtrit(num_problems + 1, (1.0 + CONFIDENCE) / 2.0) * added.std(ddof=1) / np.sqrt(num_problems + 2))
        centre = float(added.mean())
        return IntervalEstimate(mean, max(-widest, centre - half), min(widest, centre + half), num_problems)
    # All values are equal. The share of all problems that have another value has an exact upper limit (Clopper & Pearson
    # 1934), and such a value is at most `widest` from zero.
    other = 1.0 - ((1.0 - CONFIDENCE) / 2.0) ** (1.0 / num_problems)
    return IntervalEstimate(mean, mean - other * (widest + mean), mean + other * (widest - mean), num_problems)


class Interaction(NamedTuple):
    """A two-by-two table. The name of a cell has two digits: blend off or on, then sampler off or on."""

    cells: dict[str, IntervalEstimate]
    """Accuracies of `00`, `01`, `10` and `11`. Each problem counts once, here and in `effect`."""
    effect: IntervalEstimate
    """(11 - 10) - (01 - 00): the sampler's gain with the blend minus its gain without the blend; 0 if both effects add up."""


def two_by_two(o00: PairedOutcomes, o01: PairedOutcomes, o10: PairedOutcomes, o11: PairedOutcomes) -> Interaction:
    """The interaction, with the interval of `paired.mean_difference` over problems, each with all four runs.

    Raises ValueError if the runs are not on the same problems in the same order, or have no problems.
    """
    runs = {"00": o00, "01": o01, "10": o10, "11": o11}
    if len({of.problems for of in runs.values()}) > 1:
        raise ValueError("the runs are not on the same problems in the same order: see estimates.aligned")
    if not o00.problems:
        raise ValueError("the runs have no problem in common, so they cannot be compared")
    chains = int(min(of.chains.min() for of in runs.values()))
    effect = mean_difference((o11.correct - o10.correct) - (o01.correct - o00.correct), chains, widest=2.0)
    cells = {name: accuracy_of(of) if of.single else mean_share(of.correct) for name, of in runs.items()}
    return Interaction(cells, effect)


class Agreement(NamedTuple):
    """The comparison of a number, such as log p, between the samples of two runs."""

    problems: int
    samples_a: int
    samples_b: int
    difference: float
    """Mean of `a` minus mean of `b`, averaged over problems."""
    p_value: float
    """Two-sided. Not adjusted for the number of comparisons."""


def agreement(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> Agreement | None:
    """Compares the means of two runs within each problem. None if they share no problem.

    Args:
        a: the values of each problem's independent samples.
        b: the same for the other run.
    """
    shared = [problem for problem in a if problem in b and len(a[problem]) and len(b[problem])]
    if not shared:
        return None
    generator = np.random.default_rng(0)
    observed, permuted = 0.0, np.zeros(_RESAMPLES)
    for problem in shared:
        count = len(a[problem])
        pooled = np.array([*a[problem], *b[problem]], dtype=np.float64)
        rest = len(pooled) - count
        observed += pooled[:count].mean() - pooled[count:].mean()
        first = generator.permuted(np.tile(pooled, (_RESAMPLES, 1)), axis=1)[:, :count].sum(axis=1)
        permuted += first / count - (pooled.sum() - first) / rest
    # Sums in another order differ in their last bits. A permutation that restores the observed labels must count.
    at_least = int(np.sum(np.abs(permuted) >= abs(observed) - 1e-9 * (1.0 + abs(observed))))
    return Agreement(len(shared), sum(len(a[problem]) for problem in shared), sum(len(b[problem]) for problem in shared),
                     observed / len(shared), (1 + at_least) / (1 + _RESAMPLES))


class VarianceParts(NamedTuple):
    """The variance of a problem's difference of two runs, in its two parts."""

    problems: float
    """Of the true differences, over problems."""
    chains: float
    """Of one chain of each run, within a problem; a mean of c chains has 1/c of it."""

    @classmethod
    def of(cls, a: PairedOutcomes, b: PairedOutcomes) -> "VarianceParts":
        """The estimates from two runs on the same problems, at least two.

        A run of one chain a problem, such as greedy decoding, counts as without noise of its own. If both runs have one chain,
        the parts cannot be told apart, and all of the variance counts as that of chains.
        """
        variance = float((a.correct - b.correct).var(ddof=1))
        if int(max(a.chains.max(), b.chains.max())) == 1:
            return cls(0.0, variance)
        several = [(run.correct * (1.0 - run.correct), np.maximum(run.chains, 2)) for run in (a, b) if run.chains.max() > 1]
        of_means = sum(float((spread / (chains - 1)).mean()) for spread, chains in several)
        of_draws = sum(float((spread * chains / (chains - 1)).mean()) for spread, chains in several)
        return cls(max(0.0, variance - of_means), of_draws)

    def resolved(self, problems: int, chains: int) -> float | None:
        """The smallest difference that these numbers detect with power 0.8; None if it exceeds 1."""
        least = _ERRORS * float(np.sqrt((self.problems + self.chains / chains) / problems))
        return least if least <= 1.0 else None

    def problems_needed(self, difference: float, chains: int) -> int:
        """The smallest number of problems that detects the difference with power 0.8."""
        return max(2, math.ceil((_ERRORS / difference) ** 2 * (self.problems + self.chains / chains)))

    def chains_needed(self, difference: float, problems: int) -> int | None:
        """The smallest number of chains of a problem that detects it; None if no number does."""
        left = problems * (difference / _ERRORS) ** 2 - self.problems
        return None if left <= 0.0 else max(1, math.ceil(self.chains / left))


_SWAPS = 2000
_EXPECTED = 5.0
"""Smallest expected count of a cell; rarer cells share one cell."""


class SwapTest(NamedTuple):
    """The result of a test of two samples of n pairs."""

    distance: float
    """Distance of the two samples."""
    noise: float
    """Mean distance under the null hypothesis."""
    p: float
    """Share of the 2,001 assignments, including the observed one, whose statistic is at least the observed one's."""


def histograms(one: np.ndarray, other: np.ndarray) -> SwapTest:
    """Compares counts (pairs, cells). The statistic is the two-sample chi-square, the distance the total variation."""
    one, other = (np.asarray(counts, np.float64) for counts in (one, other))
    whole = (one + other).sum(axis=0)
    rare = whole < 2.0 * _EXPECTED
    pairs = [np.column_stack([counts[:, ~rare], counts[:, rare].sum(axis=1)]) for counts in (one, other)]
    pairs = [counts[:, np.append(whole[~rare], whole[rare].sum()) > 0.0] for counts in pairs]
    total, signs = (pairs[0] + pairs[1]).sum(axis=0), _signs(len(one))
    first = 0.5 * (total + signs @ (pairs[0] - pairs[1]))
    second = total - first
    sizes = first.sum(axis=1, keepdims=True), second.sum(axis=1, keepdims=True)
    chi_square = sum(((counts - size * total / total.sum()) ** 2 / (size * total / total.sum())).sum(axis=1)
                     for counts, size in zip((first, second), sizes, strict=True))
    distance = 0.5 * np.abs(first / sizes[0] - second / sizes[1]).sum(axis=1)
    return SwapTest(float(distance[0]), float(distance[1:].mean()), _p(chi_square))


def means(one: np.ndarray, other: np.ndarray) -> SwapTest:
    """Compares the means of values (pairs,). The distance is the absolute difference."""
    difference = np.abs(_signs(len(one)) @ (np.asarray(one, np.float64) - other)) / len(one)
    return SwapTest(float(difference[0]), float(difference[1:].mean()), _p(difference))


@lru_cache(maxsize=4)
def _signs(pairs: int) -> np.ndarray:
    """(1 + swaps, pairs) of 1 and -1, where -1 swaps a pair. The first row is the observed assignment."""
    uniforms = Key(0).fold_in("swaps").uniforms(0, _SWAPS * pairs).reshape(_SWAPS, pairs)
    return np.concatenate([np.ones((1, pairs)), np.where(uniforms < 0.5, -1.0, 1.0)])


def _p(statistic: np.ndarray) -> float:
    """The p-value of a statistic (1 + swaps,), whose first value is the observed one.

    A tolerance counts values that differ by rounding as equal.
    """
    return float(np.mean(statistic >= statistic[0] * (1.0 - 1e-9) - 1e-12))
