"""How well signals tell wrong answers, or wrong steps, from right ones: AUROC and differences of it, clustered by problem.

AUROC is the chance that a wrong case has the larger signal than a right one, ties counting half: Mann-Whitney's U over the
number of pairs (Hanley & McNeil 1982). All signals are asked the same way round: one below 0.5 falls where answers are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_mcmc.statistics.intervals import Clusters, IntervalEstimate

DRAFT, TARGET, OTHER = "draft", "target", "other"
"""Kinds of signals: what needs the draft, what the target says by itself, and what neither has been asked for."""


class Signal(NamedTuple):
    """A number of each case that may tell whether it is wrong."""

    name: str
    kind: str
    statistic: str | None
    """`mean` or `max` over the case's tokens; None for what is no number of tokens."""
    values: np.ndarray
    """float64 (cases,)."""

    @property
    def label(self) -> str:
        """Name and statistic."""
        return self.name if self.statistic is None else f"{self.name} {self.statistic}"


class Cases:
    """Answers or steps, some of them wrong, that belong to problems.

    Args:
        problems: that of each case.
        wrong: whether each case is.
        signals: of all cases.
    """

    def __init__(self, problems: Sequence[Hashable], wrong: Sequence[bool], signals: Sequence[Signal]):
        self.problems, self.wrong, self.signals = list(problems), np.asarray(wrong, bool), list(signals)
        self.names = list(dict.fromkeys(self.problems))
        place = {name: number for number, name in enumerate(self.names)}
        self.place, self.num_problems = np.array([place[name] for name in self.problems], np.int64), len(self.names)
        # One observation a problem: what is drawn anew are problems, and sums over their cases are all that is needed of them.
        self._clusters = Clusters(self.names)

    @property
    def size(self) -> int:
        """Number of cases."""
        return len(self.wrong)

    @property
    def decided(self) -> bool:
        """Whether there are wrong cases and right ones: else there is nothing to tell apart."""
        return bool(self.wrong.any() and not self.wrong.all())

    def pairs(self, scores: np.ndarray) -> np.ndarray:
        """float64 (problems, problems): how many wrong cases of one have a larger score than right cases of the other.

        Pairs are counted, ties half. The sum over all problems is Mann-Whitney's U.
        """
        wrong, right = np.flatnonzero(self.wrong), np.flatnonzero(~self.wrong)
        order = right[np.argsort(scores[right], kind="stable")]
        upto = np.zeros((len(right) + 1, self.num_problems))  # right cases of each problem among the first so many
        upto[np.arange(1, len(right) + 1), self.place[order]] = 1.0
        upto = upto.cumsum(axis=0)
        below, not_above = (np.searchsorted(scores[order], scores[wrong], side=side) for side in ("left", "right"))
        found = np.zeros((self.num_problems, self.num_problems))
        np.add.at(found, self.place[wrong], 0.5 * (upto[below] + upto[not_above]))
        return found

    def auroc(self, pairs: np.ndarray, group: np.ndarray | None = None) -> IntervalEstimate:
        """Of the pairs of a signal; of the difference of two signals' pairs, the difference of their AUROCs, paired.

        Args:
            group: int64 (problems,); only pairs within a group count. None for all pairs.
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
        """Sum over the cases of one over that of the other."""
        return self._clusters.ratio(self.sums(above), self.sums(below))._replace(n=self.size)

    def statistic(self, function: Callable[[np.ndarray], np.ndarray]) -> IntervalEstimate:
        """Any other: function(counts (resamples, problems)) -> (resamples,), how often each problem counts; nan for none."""
        return self._clusters.statistic(function)._replace(n=self.size)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each problem's cases, float64 (problems,)."""
        return np.bincount(self.place, values, self.num_problems)


def roc(wrong: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of right and of wrong cases at or above each threshold, from none to all: the area under it is AUROC."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(wrong[order])[ends]
    return (np.append(0.0, (ends + 1 - hits) / (~wrong).sum()), np.append(0.0, hits / wrong.sum()))


def _divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below != 0)
