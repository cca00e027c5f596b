"""Rules of votes over the chains of a problem, beside the majority vote. They read records and need no model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import runtime
from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.store.records import Record

_TIE = 1e-12
"""Scores that differ by less than this share of the largest one are tied. Sums of equal weights differ by rounding."""


@dataclass(slots=True, kw_only=True)
class PowerVote:
    """Vote with importance weights for p^alpha: exp(alpha log p - log q), normalised over the chains that vote.

    The score of an answer estimates its probability under p^alpha of whole sequences, among the sequences with an answer. For
    draws from p the weight is exp((alpha - 1) log p). Weighted votes over base samples: arXiv 2608.14420.
    """

    name: ClassVar[str] = "power"
    needs_log_q: ClassVar[bool] = True
    """Whether the weights are importance weights. They need independent draws whose log q is known, from a law that can draw
    every sequence."""

    alpha: float = runtime(4.0, "exponent of the power vote: weights of the chains for p^alpha", gt=0)

    @property
    def shown(self) -> str:
        """The rule with its main parameters, for labels of rows."""
        return f"power vote (alpha {self.alpha:g})"

    def weights(self, votes: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
        """Weights of the chains, float64 (..., chains). They sum to 1 over the chains that vote, or to 0 if none does.

        Args:
            votes: whether each chain votes, bool (..., chains).
            log_p: log p of each chain at temperature 1 in nats, float64 (..., chains).
            log_q: log q of each chain under the law that it was drawn from, in the same shape.
        """
        log_weights = np.where(votes, self.alpha * log_p - log_q, -np.inf)
        most = log_weights.max(axis=-1, keepdims=True)
        weights = np.exp(log_weights - np.where(np.isneginf(most), 0.0, most))
        return weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class AdaptiveVote:
    """Majority vote whose chains are drawn one after another, until the leader is likely enough to be the majority's answer.

    After each chain the share of the leader among the votes for the two leading answers has the posterior Beta(v1 + 1,
    v2 + 1). The vote ends when P(share > 1/2) is at least `confidence`, or with the last chain.
    Adaptive-Consistency, Aggarwal et al. 2023 (arXiv 2305.11860), Beta criterion. Its cost is that of its chains.
    """

    name: ClassVar[str] = "adaptive"
    needs_log_q: ClassVar[bool] = False

    confidence: float = runtime(0.95, "posterior probability of the leading answer that ends an adaptive vote", gt=0.5, lt=1)

    @property
    def shown(self) -> str:
        """As of `PowerVote`."""
        return f"adaptive vote (confidence {self.confidence:g})"

    def ends(self, leader: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Whether a vote ends at these numbers of votes of the leading answer and of the second one."""
        return _ended(self.confidence, int(np.max(leader, initial=0)))[leader, second]


@cache
def _ended(confidence: float, most: int) -> np.ndarray:
    """Whether a vote ends, bool (most + 1, most + 1), by the votes of the leading answer and of the second one."""
    from scipy.stats import beta  # takes a second

    leader, second = np.mgrid[: most + 1, : most + 1]
    return beta.sf(0.5, leader + 1, second + 1) >= confidence


def chances(scores: np.ndarray) -> np.ndarray:
    """The probability that a vote returns each answer, float64 (..., answers): the largest score wins.

    Tied answers are drawn uniformly. All are 0 if no chain votes.

    Args:
        scores: the summed weights of each answer, float64 (..., answers).
    """
    most = scores.max(axis=-1, keepdims=True, initial=0.0)
    won = (scores >= (1.0 - _TIE) * most) & (most > 0.0)
    return won / np.maximum(won.sum(axis=-1, keepdims=True), 1)


@dataclass(slots=True, kw_only=True)
class Vote:
    """The parameters of all rules: the group of fields `vote`."""

    power: PowerVote = dataclasses.field(default_factory=PowerVote)
    adaptive: AdaptiveVote = dataclasses.field(default_factory=AdaptiveVote)

    @property
    def rules(self) -> dict[str, VoteRule]:
        """The rules by name."""
        return {rule.name: rule for rule in (self.power, self.adaptive)}

    @classmethod
    def of(cls, values: Mapping[str, Mapping[str, Any] | None]) -> Vote:
        """The rules with these parameters, a dictionary for each rule, as `config.yaml` has them. Raises TypeError."""
        rules: dict[str, Any] = {rule.name: rule(**(values.get(rule.name) or {})) for rule in RULES}
        return cls(**rules)


VoteRule = PowerVote | AdaptiveVote
RULES = (PowerVote, AdaptiveVote)
WEIGHTED = tuple(rule.name for rule in RULES)
"""The names of the rules beside the majority vote."""
VOTES = ("majority", *WEIGHTED)
"""The ways to combine chains that compare their answers. They need answers that can be compared as texts."""


ProgramRule = Literal["examples", "behaviour", "examples_vote"]
"""One program of several draws, by what they do on the examples of the question (`grader.examples`). None reads a verdict.

- `examples`: draws come one after another, until one passes every example. If none does, or the question has none, it is the
  program that passes most, of equal ones the likeliest by log p.
- `behaviour`: the likeliest program of the largest class that returns the same. Of equal classes that with the likeliest.
- `examples_vote`: the same among the programs that pass most examples.
"""
PROGRAM_RULES: tuple[ProgramRule, ...] = get_args(ProgramRule)
IN_WORDS = {"examples": "first that passes its examples", "behaviour": "vote by behaviour",
            "examples_vote": "most examples, then vote by behaviour"}


class KeptProgram(NamedTuple):
    """The program that a rule keeps."""

    record: Record
    used: int
    """Draws that the rule needs."""


def has_examples(records: Sequence[Record]) -> bool:
    """Whether programs were run on examples: a question without examples has neither field."""
    return any("behaviour" in record or "passed" in record for record in records)


def program_chosen(draws: Sequence[Record], rule: ProgramRule) -> KeptProgram:
    """The program of a problem's draws, which are in their order. Draws that were not made are never kept."""
    made = [record for record in draws if record["verdict"] not in UNDRAWN]
    if not made:
        return KeptProgram(draws[0], len(draws))
    if rule == "examples":
        for used, record in enumerate(draws, start=1):
            if record.get("passed") == 1.0 and record["verdict"] not in UNDRAWN:
                return KeptProgram(record, used)
    if rule != "behaviour":
        most = max(map(_passed, made))
        made = [record for record in made if _passed(record) == most]
    sizes = Counter(record.get("behaviour") for record in made) if rule != "examples" else Counter[str | None]()
    sizes.pop(None, None)
    kept = max(made, key=lambda record: (sizes[record.get("behaviour")], record["log_p"]))
    return KeptProgram(kept, len(draws))


def program_rule(name: str, records: Sequence[Record]) -> ProgramRule:
    """The rule with this name. Raises UserError for records of programs that were not run on examples."""
    if records and not has_examples(records):
        raise UserError(f"aggregate={name}: given records without what programs do on examples; allowed: those of a run with "
                        "grader.examples=true, or of dflash_mcmc.regrade with it")
    return cast("ProgramRule", name)


def _passed(record: Record) -> float:
    return record.get("passed", 0.0)
