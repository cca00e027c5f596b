"""AUROC of signals that separate wrong answers or steps from right ones, and its differences, clustered by problem.

AUROC is the probability that a wrong case has a larger signal than a right one, where ties count half. It equals
Mann-Whitney's U divided by the number of pairs (Hanley & McNeil 1982). Signals are never reversed. An AUROC below 0.5 means
that the signal is smaller for wrong cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: signals that need the draft, signals of the target alone, and signals that need neither."""


class Signal(NamedTuple):
    """A value per case that may predict whether the case is wrong."""

    name: str
    kind: str
    statistic: str | None
    """`mean` or `max` over the case's tokens; None for signals that are not computed from tokens."""
    values: np.ndarray
    """float64 (cases,)."""

    @property
    def label(self) -> str:
        """Name and statistic."""
        return self.name if self.statistic is None else f"{self.name} {self.statistic}"


class Cases:
    """Answers or steps, right or wrong, grouped by problem.

    Args:
        problems: the problem of each case.
        wrong: whether each case is wrong.
        signals: signals of all cases.
    """

    def __init__(self, problems: Sequence[str], wrong: Sequence[bool], signals: Sequence[Signal]):
        self.problems, self.wrong, self.signals = list(problems), np.asarray(wrong, bool), list(signals)
        self.names = list(dict.fromkeys(self.problems))
        place = {name: number for number, name in enumerate(self.names)}
        self.place, self.num_problems = np.array([place[name] for name in self.problems], np.int64), len(self.names)
        # The bootstrap resamples problems, and all statistics need only sums over a problem's cases. Each problem is
        # therefore one observation.
        self._clusters = Clusters(self.names)

    @property
    def size(self) -> int:
        """Number of cases."""
        return len(self.wrong)

    @property
    def decided(self) -> bool:
        """Whether there are both wrong and right cases; otherwise there is no AUROC."""
        return bool(self.wrong.any() and not self.wrong.all())

    def pairs(self, scores: np.ndarray) -> np.ndarray:
        """The number of pairs in which the wrong case has the larger score, float64 (problems, problems).

        The wrong case is from the first problem, the right case from the second one. Ties count half. The sum over all
        problems is Mann-Whitney's U.
        """
        wrong, right = np.flatnonzero(self.wrong), np.flatnonzero(~self.wrong)
        order = right[np.argsort(scores[right], kind="stable")]
        upto = np.zeros((len(right) + 1, self.num_problems))  # number of right cases of each problem among the first n
        upto[np.arange(1, len(right) + 1), self.place[order]] = 1.0
        upto = upto.cumsum(axis=0)
        below, not_above = (np.searchsorted(scores[order], scores[wrong], side=side) for side in ("left", "right"))
        found = np.zeros((self.num_problems, self.num_problems))
        np.add.at(found, self.place[wrong], 0.5 * (upto[below] + upto[not_above]))
        return found

    def auroc(self, pairs: np.ndarray, group: np.ndarray | None = None) -> IntervalEstimate:
        """The AUROC from a signal's pairs. The difference of two signals' pairs gives the paired difference of their AUROCs.

        Args:
            group: int64 (problems,); only pairs within a group count. None means all pairs.
        """
        group = np.zeros(self.num_problems, np.int64) if group is None else group
        pairs, member = pairs * (group[:, None] == group), np.eye(group.max() + 1)[group]
        wrong, right = (self.sums(kind)[:, None] * member for kind in (self.wrong, ~self.wrong))

        def of(counts: np.ndarray) -> np.ndarray:
            return _divided(((counts @ pairs) * counts).sum(axis=1), ((counts @ wrong) * (counts @ right)).sum(axis=1))

        return self.statistic(of)

    def mean(self, values: np.ndarray) -> IntervalEstimate:
        """Mean over the cases."""
        return self.ratio(values, np.ones(self.size))

    def ratio(self, above: np.ndarray, below: np.ndarray) -> IntervalEstimate:
        """The sum of `above` over the cases divided by the sum of `below`."""
        return self._clusters.ratio(self.sums(above), self.sums(below))._replace(n=self.size)

    def statistic(self, function: Callable[[np.ndarray], np.ndarray]) -> IntervalEstimate:
        """Any other statistic: function(counts (resamples, problems)) -> (resamples,), with nan if it is undefined."""
        return self._clusters.statistic(function)._replace(n=self.size)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each problem's cases, float64 (problems,)."""
        return np.bincount(self.place, values, self.num_problems)


def roc(wrong: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of right and of wrong cases at or above each threshold, from none to all. The curve's area is the AUROC."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(wrong[order])[ends]
    return (np.append(0.0, (ends + 1 - hits) / (~wrong).sum()), np.append(0.0, hits / wrong.sum()))


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)
