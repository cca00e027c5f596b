"""Rules of weighted votes over the chains of a problem: the weight of each chain, and the answer that the weights choose.

A rule is a function of the recorded log p and log q; it needs no model. `majority` is the rule with equal weights.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import runtime

_TIE = 1e-12
"""Scores that differ by less than this share of the largest one are tied. Sums of equal weights differ by rounding."""


class VoteRule(ABC):
    """Base class of the rules. Its fields are the parameters in `vote.<name>` of the configuration."""

    __slots__ = ()

    name: ClassVar[str]
    needs_log_q: ClassVar[bool] = False
    """Whether the weights are importance weights. They need independent draws whose log q is known, from a law that can draw
    every sequence."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """The rule with its main parameters, for labels of rows."""

    @abstractmethod
    def weights(self, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        """Weights of the chains, float64 (..., chains). They sum to 1 over the chains that vote, or to 0 if none does.

        Args:
            votes: whether each chain votes, bool (..., chains).
            log_p: log p of each chain at temperature 1 in nats, float64 (..., chains).
            log_q: log q of each chain under the law that it was drawn from, in the same shape.
        """

    def chances(self, scores: np.ndarray) -> np.ndarray:
        """The probability that each answer is returned, float64 (..., answers).

        A vote returns the answer with the largest score; tied answers are drawn uniformly. All are 0 if no chain votes.

        Args:
            scores: the summed weights of each answer, float64 (..., answers).
        """
        most = scores.max(axis=-1, keepdims=True, initial=0.0)
        won = (scores >= (1.0 - _TIE) * most) & (most > 0.0)
        return won / np.maximum(won.sum(axis=-1, keepdims=True), 1)


@dataclass(slots=True, kw_only=True)
class PowerVote(VoteRule):
    """Vote with importance weights for p^alpha: exp(alpha log p - log q), normalised over the chains that vote.

    The score of an answer estimates its probability under p^alpha of whole sequences, among the sequences with an answer. For
    draws from p the weight is exp((alpha - 1) log p). Weighted votes over base samples: arXiv 2608.14420.
    """

    name = "power"
    needs_log_q = True

    alpha: float = runtime(4.0, "exponent of the power vote: weights of the chains for p^alpha", gt=0)

    @property
    def shown(self) -> str:
        return f"power vote (alpha {self.alpha:g})"

    def weights(self, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        return _importance(self.alpha, votes, log_p, log_q)


@dataclass(slots=True, kw_only=True)
class SoftSat(VoteRule):
    """Vote with weights that grow with the rank of log p and saturate: exp(beta (1 - (1 - min(u / saturation, 1))^2)).

    u in (0, 1] is the rank of log p among the chains that vote, divided by their number. The likeliest chain has u = 1; equal
    values have their mean rank. The weight is clipped to [low, high]. The weights follow no sequence law, so any sampler's
    chains have them. Formula and values of arXiv 2608.14420, taken from a summary of the paper.
    """

    name = "softsat"

    beta: float = runtime(1.0, "strength of the softsat weights; 0 is the majority vote", ge=0)
    saturation: float = runtime(0.75, "rank of log p, as a share of the votes, from which on softsat weights are equal", gt=0,
                                le=1)
    low: float = runtime(0.75, "smallest softsat weight", gt=0)
    high: float = runtime(17.0, "largest softsat weight; not active while beta <= log(high)", gt=0)

    @property
    def shown(self) -> str:
        return f"softsat vote (beta {self.beta:g})"

    def check(self) -> None:
        """Raises ConfigError if the smallest weight is above the largest one."""
        if self.low > self.high:
            raise ConfigError("vote.softsat.low", self.low, f"a number <= vote.softsat.high (given {self.high:g})")

    def weights(self, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        height = 1.0 - (1.0 - np.minimum(_ranks(votes, log_p) / self.saturation, 1.0)) ** 2
        log_weights = np.clip(self.beta * height, np.log(self.low), np.log(self.high))
        return _normalised(np.where(votes, log_weights, -np.inf))


@dataclass(slots=True, kw_only=True)
class AnswerPower(VoteRule):
    """A draw from the answer law of p^alpha, raised to gamma: chances proportional to (sum of an answer's weights)^gamma.

    The weights are those of the power vote. The sum over an answer's chains is raised, not each weight, so that many chains
    with one answer support each other. The most probable answer is the power vote's winner, so the rule is judged by the
    expected accuracy of a draw. Source: ReSight (arXiv 2609.34905, gamma 2).
    """

    name = "answer_power"
    needs_log_q = True

    alpha: float = runtime(2.0, "exponent of the sequences in answer_power: weights of the chains for p^alpha", gt=0)
    gamma: float = runtime(2.0, "exponent of the answers in answer_power", gt=0)

    @property
    def shown(self) -> str:
        return f"answer power draw (alpha {self.alpha:g}, gamma {self.gamma:g})"

    def weights(self, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        return _importance(self.alpha, votes, log_p, log_q)

    def chances(self, scores: np.ndarray) -> np.ndarray:
        most = scores.max(axis=-1, keepdims=True, initial=0.0)
        raised = (scores / np.where(most > 0.0, most, 1.0)) ** self.gamma
        return raised / np.maximum(raised.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)


@dataclass(slots=True, kw_only=True)
class AdaptiveVote(VoteRule):
    """Majority vote whose chains are drawn one after another, until the leader is likely enough to be the majority's answer.

    After each chain the share of the leader among the votes for the two leading answers has the posterior Beta(v1 + 1,
    v2 + 1). The vote ends when P(share > 1/2) is at least `confidence`, or with the last chain.
    Adaptive-Consistency, Aggarwal et al. 2023 (arXiv 2305.11860), Beta criterion. Its cost is that of its chains.
    """

    name = "adaptive"

    confidence: float = runtime(0.95, "posterior probability of the leading answer that ends an adaptive vote", gt=0.5, lt=1)

    @property
    def shown(self) -> str:
        return f"adaptive vote (confidence {self.confidence:g})"

    def weights(self, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        return votes / np.maximum(votes.sum(axis=-1, keepdims=True), 1)

    def ends(self, leader: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Whether a vote ends at these numbers of votes of the leading answer and of the second one."""
        return _ended(self.confidence, int(np.max(leader, initial=0)))[leader, second]


@cache
def _ended(confidence: float, most: int) -> np.ndarray:
    """Whether a vote ends, bool (most + 1, most + 1), by the votes of the leading answer and of the second one."""
    from scipy.stats import beta  # takes a second

    leader, second = np.mgrid[: most + 1, : most + 1]
    return beta.sf(0.5, leader + 1, second + 1) >= confidence


@dataclass(slots=True, kw_only=True)
class Vote:
    """The parameters of all rules: the group of fields `vote`."""

    power: PowerVote = dataclasses.field(default_factory=PowerVote)
    softsat: SoftSat = dataclasses.field(default_factory=SoftSat)
    answer_power: AnswerPower = dataclasses.field(default_factory=AnswerPower)
    adaptive: AdaptiveVote = dataclasses.field(default_factory=AdaptiveVote)

    @property
    def rules(self) -> dict[str, VoteRule]:
        """The rules by name."""
        return {rule.name: rule for rule in (self.power, self.softsat, self.answer_power, self.adaptive)}

    @classmethod
    def of(cls, values: Mapping[str, Mapping[str, Any] | None]) -> Vote:
        """The rules with these parameters, a dictionary for each rule, as `config.yaml` has them. Raises TypeError."""
        rules: dict[str, Any] = {rule.name: rule(**(values.get(rule.name) or {})) for rule in RULES}
        return cls(**rules)


RULES: tuple[type[VoteRule], ...] = (PowerVote, SoftSat, AnswerPower, AdaptiveVote)
WEIGHTED = tuple(rule.name for rule in RULES)
"""The names of the rules with weights."""
VOTES = ("majority", *WEIGHTED)
"""The ways to combine chains that compare their answers. They need answers that can be compared as texts."""


def _importance(alpha: float, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Self-normalised importance weights of the chains that vote, for p^alpha with draws from q."""
    return _normalised(np.where(votes, alpha * log_p - log_q, -np.inf))


def _normalised(log_weights: np.ndarray) -> np.ndarray:
    """exp(log_weights) divided by the sum over the last axis; zeros if all are -inf."""
    most = log_weights.max(axis=-1, keepdims=True)
    weights = np.exp(log_weights - np.where(np.isneginf(most), 0.0, most))
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)


def _ranks(votes: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    """Rank of each chain's log p among the chains that vote, divided by their number: in (0, 1] for chains that vote."""
    own, other, counted = log_p[..., :, None], log_p[..., None, :], votes[..., None, :]
    below, equal = ((compared & counted).sum(axis=-1) for compared in (other < own, other == own))
    return (below + (equal + 1) / 2) / np.maximum(votes.sum(axis=-1, keepdims=True), 1)
