"""Weighted votes over the chains of each problem, and their expected result for fewer chains. `rules` has the weights.

The conventions are those of the majority vote (`chains`), also for the equality of answers. A chain without an answer does not
vote and has no weight. A tie counts as the mean of a uniform draw among the winners. A problem without votes is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.outcomes import by_problem
from dflash_mcmc.statistics.selection import check_log_q
from dflash_mcmc.statistics.votes import Votes

if TYPE_CHECKING:
    from dflash_mcmc.statistics.rules import VoteRule
    from dflash_mcmc.store.records import Record

_MOST_WAYS = 1000
"""The largest number of ways to choose chains that are used."""
_AT_ONCE = 4_000_000
"""Bound on the pairs of chains that are compared at once."""
_MOST = 0.5
"""A chain with more than this share of the weight decides the vote alone."""


class Weighed(NamedTuple):
    """The expected result of a weighted vote on one problem: means over ways to choose the chains."""

    correct: float
    """Probability that the returned answer is correct."""
    effective: float
    """Effective number of chains, (sum of weights)^2 / sum of squared weights; 0 if no chain votes."""
    dominated: float
    """Share of the ways in which one chain has more than half of the weight, although several chains vote."""


class _Ballots:
    """The votes of a problem as arrays over its chains."""

    def __init__(self, chains: Sequence[Record], rule: VoteRule):
        self.votes = Votes.of(chains)
        self._of_chain = np.array(self.votes.of_chain, np.int64)
        self._log_p = np.array([record["log_p"] for record in chains], np.float64)
        self._log_q = np.array([record["log_q"] for record in chains], np.float64) if rule.needs_log_q else self._log_p
        self._correct = np.array([candidate.correct for candidate in self.votes.candidates], np.float64)
        self._rule = rule

    def weights(self, chosen: np.ndarray) -> np.ndarray:
        """Weights of chosen chains, (ways, k)."""
        return self._rule.weights(self._of_chain[chosen] >= 0, self._log_p[chosen], self._log_q[chosen])

    def chances(self, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The probability that each answer is returned, (ways, answers)."""
        shape = len(chosen), len(self.votes.candidates) + 1  # the last column has the chains that do not vote
        places = self._of_chain[chosen] % shape[1] + shape[1] * np.arange(len(chosen))[:, None]
        scores = np.bincount(places.ravel(), weights.ravel(), minlength=shape[0] * shape[1]).reshape(shape)
        return self._rule.chances(scores[:, :-1])

    def weighed(self, chosen: np.ndarray) -> Weighed:
        """The means over these ways to choose chains, an index array (ways, k)."""
        ways, k = chosen.shape
        parts = np.array_split(chosen, -(-ways * k * k // _AT_ONCE))
        correct, effective, dominated = np.concatenate([self._of_each(part) for part in parts], axis=1).mean(axis=1)
        return Weighed(round(float(correct), 12), float(effective), float(dominated))

    def _of_each(self, chosen: np.ndarray) -> np.ndarray:
        """The values of `Weighed` for each way, (3, ways)."""
        weights = self.weights(chosen)
        squares = (weights**2).sum(axis=-1)
        effective = np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0.0)
        several = (self._of_chain[chosen] >= 0).sum(axis=-1) > 1
        correct = self.chances(chosen, weights) @ self._correct
        return np.stack([correct, effective, (weights.max(axis=-1) > _MOST) & several])


def weighted(records: Sequence[Record], rule: VoteRule) -> list[dict]:
    """The weighted vote of each problem.

    A row has problem, answer (the most probable one's most frequent text; None in a tie and without votes), chance (of that
    answer to be returned), answered (number of chains that vote), chains, tied, winners (texts of the most probable answers),
    correct (in [0, 1]: the probability that the returned answer is correct), effective and dominated (see `Weighed`).

    Raises:
        UserError: if the rule needs log q, and a chain has none or is not an independent draw.
    """
    check_weights(records, rule)
    rows = []
    for problem, chains in by_problem(records).items():
        ballots, chosen = _Ballots(chains, rule), np.arange(len(chains))[None]
        candidates = ballots.votes.candidates
        chances, = ballots.chances(chosen, ballots.weights(chosen))
        most = chances.max(initial=0.0)
        winners = [candidate.answer for candidate, chance in zip(candidates, chances, strict=True)
                   if most > 0.0 and math.isclose(chance, most, rel_tol=1e-12)]
        found = ballots.weighed(chosen)
        rows.append({"problem": problem, "answer": winners[0] if len(winners) == 1 else None, "chance": float(most),
                     "answered": ballots.votes.answered, "chains": len(chains), "tied": len(winners) > 1, "winners": winners,
                     **found._asdict()})
    return rows


def expected_weighted(chains: Sequence[Record], rule: VoteRule, ks: Sequence[int]) -> list[Weighed]:
    """For each k, the expected result of a weighted vote over k chains of one problem.

    It is the mean over all ways to choose k of the chains if there are at most 1,000, as for the majority vote. If there are
    more, it is the mean over 1,000 of them, drawn with a fixed seed. The standard error of the latter is at most 1.6 points on
    one problem, and falls with the square root of the number of problems.
    """
    ballots = _Ballots(chains, rule)
    return [ballots.weighed(_ways(len(chains), k)) for k in ks]


def check_weights(records: Sequence[Record], rule: VoteRule) -> None:
    """Checks that the records have the weights of a rule. Raises UserError."""
    if rule.needs_log_q:
        check_log_q(records, f"aggregate={rule.name}")


@lru_cache(maxsize=64)
def _ways(size: int, k: int) -> np.ndarray:
    """Ways to choose k of `size` chains, int64 (ways, k): all, or `_MOST_WAYS` drawn uniformly with a fixed seed."""
    if math.comb(size, k) <= _MOST_WAYS:
        return np.array(list(itertools.combinations(range(size), k)), np.int64)
    uniforms = Key(0).fold_in("votes", size, k).uniforms(0, _MOST_WAYS * size).reshape(_MOST_WAYS, size)
    return np.argsort(uniforms, axis=1)[:, :k]
