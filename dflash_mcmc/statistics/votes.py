"""Votes over the chains of a problem: their rules, the votes in records, and the expected result of a vote of fewer chains.

They read records and need no model. The docstring of `chains.py` defines a vote.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, groupby
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from dflash_mcmc.components import runtime
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.math.string_rule import normal_form
from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.rng import Key
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


@dataclass(slots=True, kw_only=True)
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

    def ends(self, leader: int, second: int) -> bool:
        """Whether a vote ends at these numbers of votes of the leading answer and of the second one.

        The posterior is the probability of more than `second` heads in leader + second + 1 tosses of a coin.
        """
        tosses = leader + second + 1
        return sum(math.comb(tosses, heads) for heads in range(second + 1, tosses + 1)) >= self.confidence * 2**tosses


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

    power: PowerVote = field(default_factory=PowerVote)
    adaptive: AdaptiveVote = field(default_factory=AdaptiveVote)

    @property
    def rules(self) -> "dict[str, VoteRule]":
        """The rules by name."""
        return {rule.name: rule for rule in (self.power, self.adaptive)}

    @classmethod
    def of(cls, values: Mapping[str, Mapping[str, Any] | None]) -> "Vote":
        """The rules with these parameters, a dictionary for each rule, as `config.yaml` has them. Raises TypeError."""
        return cls(power=PowerVote(**(values.get("power") or {})), adaptive=AdaptiveVote(**(values.get("adaptive") or {})))


VoteRule = PowerVote | AdaptiveVote
WEIGHTED = (PowerVote.name, AdaptiveVote.name)
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


def has_examples(records: Sequence[Record]) -> bool:
    """Whether programs were run on examples: a question without examples has neither field."""
    return any("behaviour" in record or "passed" in record for record in records)


def program_chosen(draws: Sequence[Record], rule: ProgramRule) -> tuple[Record, int]:
    """(program that is kept of a problem's draws, draws that this needs). Draws that were not made are never kept."""
    def passed(record: Record) -> float:
        return record.get("passed", 0.0)

    made = [record for record in draws if record["verdict"] not in UNDRAWN]
    if not made:
        return draws[0], len(draws)
    if rule == "examples":
        for used, record in enumerate(draws, start=1):
            if record.get("passed") == 1.0 and record["verdict"] not in UNDRAWN:
                return record, used
    if rule != "behaviour":
        most = max(map(passed, made))
        made = [record for record in made if passed(record) == most]
    sizes = Counter(record.get("behaviour") for record in made) if rule != "examples" else Counter[str | None]()
    sizes.pop(None, None)
    return max(made, key=lambda record: (sizes[record.get("behaviour")], record["log_p"])), len(draws)


class Candidate(NamedTuple):
    """An answer that received votes."""

    answer: str
    """Its most frequent text; in a tie, the first one."""
    number: int
    correct: bool
    """Whether that text was graded correct. Texts of one vote may differ in what the normal form drops."""


VoteCounts = tuple[tuple[int, ...], tuple[int, ...], int]
"""Votes of each correct and each wrong answer, in descending order, and the number of chains that do not vote.

There are several correct answers if the grader accepts answers whose normalised strings differ.
"""


class Votes(NamedTuple):
    """The candidates of a problem, in order of first appearance, and the number of chains that do not vote."""

    candidates: tuple[Candidate, ...]
    silent: int
    of_chain: tuple[int, ...]
    """The place of each chain's candidate; -1 for a chain that does not vote."""

    @classmethod
    def of(cls, chains: Sequence[Record]) -> "Votes":
        """The votes in the records of one problem."""
        texts = [(record["answer"] or "").strip() for record in chains]
        correct = {text for text, record in zip(texts, chains, strict=True) if record["verdict"] == "correct"}
        written: dict[str, Counter[str]] = {}
        for text in filter(None, texts):
            written.setdefault(normal_form(text), Counter())[text] += 1
        candidates = [Candidate(text, votes.total(), text in correct)
                      for votes in written.values() for text, _ in votes.most_common(1)]
        index_of = {vote: index for index, vote in enumerate(written)}
        return cls(tuple(candidates), texts.count(""), tuple(index_of[normal_form(text)] if text else -1 for text in texts))

    def counts(self) -> VoteCounts:
        """The counts that determine the expected result of a vote."""
        correct, wrong = (tuple(sorted((candidate.number for candidate in self.candidates if candidate.correct is side),
                                       reverse=True)) for side in (True, False))
        return correct, wrong, self.silent


@lru_cache(maxsize=4096)
def expected_majority(counts: VoteCounts, ks: tuple[int, ...]) -> tuple[float, ...]:
    """For each k, the mean correct share of the winners, over all ways to choose k of the chains.

    This is a sum over the correct answers. Each of them contributes the mean of 1 / winners if it wins, else 0.
    """
    expected, (correct, wrong, silent) = np.zeros(len(ks)), counts
    for index, votes in enumerate(correct):
        expected += _expected_win(votes, correct[:index] + correct[index + 1:] + wrong, silent, ks)
    return tuple(expected.clip(0.0, 1.0).tolist())


def _expected_win(own: int, others: tuple[int, ...], silent: int, ks: tuple[int, ...]) -> np.ndarray:
    """For each k, the mean of 1 / winners if this answer wins, else 0, over all ways to choose k of the chains.

    The ways are counted, not enumerated. For each number j of votes for this answer, an array counts the ways that give every
    other answer at most j votes. Its axes are the number of chains taken and the number of other answers with exactly j votes.
    """
    size, expected = own + sum(others) + silent, np.zeros(len(ks))
    for j in range(1, own + 1):
        ways = np.zeros((size + 1, len(others) + 1))  # [chains taken, other answers with j votes]
        ways[0, 0] = 1.0
        for votes in others:
            ways = _with_answer(ways, votes, j)
        fair = ways @ (1.0 / np.arange(1, len(others) + 2))
        fair = _with_answer(fair[:, None], silent, size + 1)[:, 0]  # chains that do not vote are not limited
        for index, k in enumerate(ks):
            if k >= j:
                expected[index] += math.comb(own, j) * fair[k - j] / math.comb(size, k)
    return expected


def _with_answer(ways: np.ndarray, votes: int, most: int) -> np.ndarray:
    """The ways after one more answer, which has `votes` chains. At most `most` of them are chosen; exactly `most` is a tie."""
    more = np.zeros_like(ways)
    for taken in range(min(votes, most) + 1):
        chosen = math.comb(votes, taken) * ways[: len(ways) - taken]
        if taken == most:
            more[taken:, 1:] += chosen[:, :-1]
        else:
            more[taken:] += chosen
    return more


_MOST_WAYS = 1000
"""The largest number of ways to choose chains that are used."""
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


def expected_weighted(chains: Sequence[Record], rule: PowerVote, ks: Sequence[int]) -> list[Weighed]:
    """For each k, the expected result of a weighted vote over k chains of one problem.

    It is the mean over all ways to choose k of the chains if there are at most 1,000, as for the majority vote. If there are
    more, it is the mean over 1,000 of them, drawn with a fixed seed. The standard error of the latter is at most 1.6 points on
    one problem, and falls with the square root of the number of problems.
    """
    votes = Votes.of(chains)
    of_chain, correct = np.array(votes.of_chain, np.int64), np.array([each.correct for each in votes.candidates], np.float64)
    log_p, log_q = (np.array(column, np.float64) for column in zip(
        *((record["log_p"], record["log_q"]) for record in chains), strict=True))

    def of(k: int) -> Weighed:
        chosen = _choices(len(chains), k)  # (ways, k)
        weights = rule.weights(of_chain[chosen] >= 0, log_p[chosen], log_q[chosen])
        # The sum of weights of each answer, (ways, answers + 1); the last column has the chains that do not vote.
        shape = len(chosen), len(correct) + 1
        places = of_chain[chosen] % shape[1] + shape[1] * np.arange(len(chosen))[:, None]
        scores = np.bincount(places.ravel(), weights.ravel(), minlength=shape[0] * shape[1]).reshape(shape)
        squares = (weights**2).sum(axis=-1)
        effective = np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0.0)
        dominated = (weights.max(axis=-1) > _MOST) & ((of_chain[chosen] >= 0).sum(axis=-1) > 1)
        means = np.stack([chances(scores[:, :-1]) @ correct, effective, dominated]).mean(axis=1)
        return Weighed(round(float(means[0]), 12), float(means[1]), float(means[2]))

    return [of(k) for k in ks]


@lru_cache(maxsize=128)
def _choices(size: int, k: int) -> np.ndarray:
    """Ways to choose k of `size` chains, int64 (ways, k): all, or `_MOST_WAYS` drawn uniformly with a fixed seed."""
    if math.comb(size, k) <= _MOST_WAYS:
        return np.array(list(combinations(range(size), k)), np.int64)
    key = Key(0).fold_in("votes", size, k)
    return np.argsort(key.uniforms(0, _MOST_WAYS * size).reshape(_MOST_WAYS, size), axis=1)[:, :k]


def adaptive(chains: Sequence[Record], rule: AdaptiveVote, most: int) -> tuple[float, int]:
    """(probability that the answer is correct, chains that are drawn) of a vote that draws chains in their order.

    Tied answers are drawn uniformly, as in `chances`.

    Args:
        most: the largest number of chains, at least 1.
    """
    votes = Votes.of(sorted(chains, key=lambda record: record["chain"])[:most])
    counts, drawn = np.zeros(len(votes.candidates)), 0
    while drawn < len(votes.of_chain):
        if (place := votes.of_chain[drawn]) >= 0:
            counts[place] += 1
        drawn += 1
        second, leader = sorted([0, 0, *map(int, counts)])[-2:]
        if rule.ends(leader, second):
            break
    return float(chances(counts) @ [each.correct for each in votes.candidates]), drawn


def check_log_q(records: Sequence[Record], what: str) -> None:
    """Checks that log_q of each record is the log-probability of its draw, as `what` needs. Raises UserError."""
    for record in records:
        name = f"{what}: problem {record['problem']}, chain {record['chain']}:"
        if record.get("log_q") is None:
            raise UserError(f"{name} the record has no log_q; allowed: records with the log-probability of their draw")
        if record.get("proposals") or record.get("trace") or record.get("measures"):
            raise UserError(f"{name} its sampler chose among draws, so log_q is not its log-probability; allowed: independent "
                            "draws, as of sampler=temperature")


def expected_likeliest(chains: Sequence[Record], k: int) -> float:
    """Expected correctness of the chain with the largest log p, over all ways to choose k of the chains.

    The N chains are sorted in descending order of log p. The best of k chosen chains is among the first r of them with
    probability 1 - C(N - r, k) / C(N, k). Equal values are chosen uniformly. Chains that could not be drawn come last and are
    not correct.
    """
    def rank(record: Record) -> tuple[bool, float]:
        not_drawn = record["verdict"] in UNDRAWN
        return not_drawn, 0.0 if not_drawn else -record["log_p"]

    expected, num_ranked, passed, ways = 0.0, 0, 0.0, math.comb(len(chains), k)
    for _, equal in groupby(sorted(chains, key=rank), key=rank):
        hits = [record["verdict"] == "correct" for record in equal]
        num_ranked += len(hits)
        upto = 1.0 - math.comb(len(chains) - num_ranked, k) / ways
        expected, passed = expected + (upto - passed) * sum(hits) / len(hits), upto
    return expected
