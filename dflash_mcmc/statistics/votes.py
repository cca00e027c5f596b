"""The votes of a problem's chains, and the expected result of a vote over fewer chains.

The docstring of `chains.py` defines a vote.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.math.string_rule import normal_form
from dflash_mcmc.grading.verdicts import UNDRAWN
from dflash_mcmc.rng import Key
from dflash_mcmc.statistics.outcomes import by_problem
from dflash_mcmc.statistics.rules import AdaptiveVote, PowerVote, chances
from dflash_mcmc.store.records import Record


class Candidate(NamedTuple):
    """An answer that received votes."""

    answer: str
    """Its most frequent text; in a tie, the first one."""
    number: int
    correct: bool
    """Whether that text was graded correct. Texts of one vote may differ in what the normal form drops."""


class VoteCounts(NamedTuple):
    """Votes of each correct and each wrong answer, in descending order, and the number of chains that do not vote."""

    correct: tuple[int, ...]
    """Votes of each correct answer. There are several if the grader accepts answers whose normalised strings differ."""
    wrong: tuple[int, ...]
    silent: int


class Votes(NamedTuple):
    """The candidates of a problem, in order of first appearance, and the number of chains that do not vote."""

    candidates: tuple[Candidate, ...]
    silent: int
    of_chain: tuple[int, ...]
    """The place of each chain's candidate; -1 for a chain that does not vote."""

    @classmethod
    def of(cls, chains: Sequence[Record]) -> Votes:
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

    @property
    def answered(self) -> int:
        """Number of votes."""
        return sum(candidate.number for candidate in self.candidates)

    def winners(self) -> list[Candidate]:
        """The candidates with the most votes: several in a tie, none if no chain votes."""
        most = max((candidate.number for candidate in self.candidates), default=0)
        return [candidate for candidate in self.candidates if candidate.number == most]

    def counts(self) -> VoteCounts:
        """The counts that determine the expected result of a vote."""
        correct, wrong = (tuple(sorted((candidate.number for candidate in self.candidates if candidate.correct is side),
                                       reverse=True)) for side in (True, False))
        return VoteCounts(correct, wrong, self.silent)


@lru_cache(maxsize=4096)
def expected_majority(counts: VoteCounts, ks: tuple[int, ...]) -> tuple[float, ...]:
    """For each k, the mean correct share of the winners, over all ways to choose k of the chains.

    This is a sum over the correct answers. Each of them contributes the mean of 1 / winners if it wins, else 0.
    """
    expected = np.zeros(len(ks))
    for index, votes in enumerate(counts.correct):
        others = counts.correct[:index] + counts.correct[index + 1:] + counts.wrong
        expected += _expected_win(votes, others, counts.silent, ks)
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

    def __init__(self, chains: Sequence[Record], rule: PowerVote):
        self.votes = Votes.of(chains)
        self._of_chain = np.array(self.votes.of_chain, np.int64)
        self._log_p = np.array([record["log_p"] for record in chains], np.float64)
        self._log_q = np.array([record["log_q"] for record in chains], np.float64)
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
        return chances(scores[:, :-1])

    def weighed(self, chosen: np.ndarray) -> Weighed:
        """The means over these ways to choose chains, an index array (ways, k)."""
        ways, k = chosen.shape
        pieces = np.array_split(chosen, -(-ways * k * k // _AT_ONCE))
        correct, effective, dominated = np.concatenate([self._of_each(piece) for piece in pieces], axis=1).mean(axis=1)
        return Weighed(round(float(correct), 12), float(effective), float(dominated))

    def _of_each(self, chosen: np.ndarray) -> np.ndarray:
        """The values of `Weighed` for each way, (3, ways)."""
        weights = self.weights(chosen)
        squares = (weights**2).sum(axis=-1)
        effective = np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0.0)
        several = (self._of_chain[chosen] >= 0).sum(axis=-1) > 1
        correct = self.chances(chosen, weights) @ self._correct
        return np.stack([correct, effective, (weights.max(axis=-1) > _MOST) & several])


def weighted(records: Sequence[Record], rule: PowerVote) -> list[dict]:
    """The weighted vote of each problem.

    A row has problem, answer (the most probable one's most frequent text; None in a tie and without votes), chance (of that
    answer to be returned), answered (number of chains that vote), chains, tied, winners (texts of the most probable answers),
    correct (in [0, 1]: the probability that the returned answer is correct), effective and dominated (see `Weighed`).

    Raises:
        UserError: if a chain has no log q or is not an independent draw.
    """
    check_log_q(records, f"aggregate={rule.name}")
    rows = []
    for problem, chains in by_problem(records).items():
        ballots, chosen = _Ballots(chains, rule), np.arange(len(chains))[None]
        candidates = ballots.votes.candidates
        returned, = ballots.chances(chosen, ballots.weights(chosen))
        most = returned.max(initial=0.0)
        winners = [candidate.answer for candidate, chance in zip(candidates, returned, strict=True)
                   if most > 0.0 and math.isclose(chance, most, rel_tol=1e-12)]
        weighed = ballots.weighed(chosen)
        rows.append({"problem": problem, "answer": winners[0] if len(winners) == 1 else None, "chance": float(most),
                     "answered": ballots.votes.answered, "chains": len(chains), "tied": len(winners) > 1, "winners": winners,
                     **weighed._asdict()})
    return rows


def expected_weighted(chains: Sequence[Record], rule: PowerVote, ks: Sequence[int]) -> list[Weighed]:
    """For each k, the expected result of a weighted vote over k chains of one problem.

    It is the mean over all ways to choose k of the chains if there are at most 1,000, as for the majority vote. If there are
    more, it is the mean over 1,000 of them, drawn with a fixed seed. The standard error of the latter is at most 1.6 points on
    one problem, and falls with the square root of the number of problems.
    """
    ballots = _Ballots(chains, rule)
    return [ballots.weighed(_choices(len(chains), k, ordered=False)) for k in ks]


class AdaptiveResult(NamedTuple):
    """The expected result of an adaptive vote on one problem: means over the orders in which its chains are drawn."""

    correct: float
    """Probability that the returned answer is correct."""
    used: tuple[float, ...]
    """The share of the orders in which the vote draws each chain. Their sum is the expected number of chains."""


def expected_adaptive(chains: Sequence[Record], rule: AdaptiveVote, most: int) -> AdaptiveResult:
    """The expected result of an adaptive vote that draws at most `most` chains.

    The recorded chains are independent draws, so that every order of them is as likely. The result is the mean over all orders
    of `most` of them if there are at most 1,000, else over 1,000 orders that are drawn with a fixed seed.
    """
    votes = Votes.of(chains)
    by_size = sorted(range(len(votes.candidates)), key=lambda place: -votes.candidates[place].number)
    sizes = tuple(votes.candidates[place].number for place in by_size)
    returned, used = _adaptive(sizes, votes.silent, rule, most)
    correct = sum(chance for place, chance in zip(by_size, returned, strict=True) if votes.candidates[place].correct)
    order = np.argsort([(by_size.index(place) if place >= 0 else len(sizes)) for place in votes.of_chain], kind="stable")
    of_chain = np.empty(len(chains))
    of_chain[order] = used
    return AdaptiveResult(round(correct, 12), tuple(of_chain.tolist()))


@lru_cache(maxsize=4096)
def _adaptive(sizes: tuple[int, ...], silent: int, rule: AdaptiveVote, most: int) -> tuple[list[float], np.ndarray]:
    """The probability that each answer is returned, and the share of the orders that draw each chain.

    Most problems of a run share their numbers of votes with others, so that they are computed once.

    Args:
        sizes: votes of each answer, in descending order. The chains are in the order of their answers; silent ones are last.
    """
    chains = sum(sizes) + silent
    orders = _choices(chains, most, ordered=True)
    answers = np.repeat(np.arange(len(sizes) + 1), [*sizes, silent])[orders]
    counts = (answers[:, :, None] == np.arange(len(sizes))).cumsum(axis=1)  # (orders, chains drawn, answers)
    leading = np.sort(np.concatenate([np.zeros((*counts.shape[:2], 2), np.int64), counts], axis=-1), axis=-1)
    ended = rule.ends(leading[..., -1], leading[..., -2])
    ended[:, -1] = True
    last = ended.argmax(axis=1)
    final = counts[np.arange(len(counts)), last].astype(np.float64)
    drawn = orders[np.arange(orders.shape[1]) <= last[:, None]]
    return chances(final).mean(axis=0).tolist(), np.bincount(drawn, minlength=chains) / len(orders)


@lru_cache(maxsize=128)
def _choices(size: int, k: int, ordered: bool) -> np.ndarray:
    """Ways to choose k of `size` chains, int64 (ways, k): all, or `_MOST_WAYS` drawn uniformly with a fixed seed."""
    number, every = (math.perm, itertools.permutations) if ordered else (math.comb, itertools.combinations)
    if number(size, k) <= _MOST_WAYS:
        return np.array(list(every(range(size), k)), np.int64)
    key = Key(0).fold_in("orders" if ordered else "votes", size, k)
    return np.argsort(key.uniforms(0, _MOST_WAYS * size).reshape(_MOST_WAYS, size), axis=1)[:, :k]


KEYS = ("log_p", "power")


def check_key(records: Sequence[Record], key: str, alpha: float | None) -> None:
    """Checks that this key can choose among the records. Raises UserError."""
    if key not in KEYS:
        raise UserError(f"best of several chains: key given {key!r}; allowed: {', '.join(KEYS)}")
    if key != "power":
        return
    if alpha is None or not alpha > 0.0:
        raise UserError(f"best of several chains by power: alpha given {alpha}; allowed: a number > 0")
    check_log_q(records, "best of several chains by power")


def check_log_q(records: Sequence[Record], what: str) -> None:
    """Checks that log_q of each record is the log-probability of its draw, as `what` needs. Raises UserError."""
    for record in records:
        name = f"{what}: problem {record['problem']}, chain {record['chain']}:"
        if record.get("log_q") is None:
            raise UserError(f"{name} the record has no log_q; allowed: records with the log-probability of their draw")
        if record.get("proposals") or record.get("trace") or record.get("measures"):
            raise UserError(f"{name} its sampler chose among draws, so log_q is not its log-probability; allowed: independent "
                            "draws, as of sampler=temperature")


def weights(chains: Sequence[Record], key: str, alpha: float | None) -> np.ndarray:
    """Probability of choosing each chain, float64 (chains,). They sum to 1, or to 0 if no chain could be drawn."""
    drawn = np.array([record["verdict"] not in UNDRAWN for record in chains])
    if not drawn.any():
        return np.zeros(len(chains))
    log_p = np.array([record["log_p"] for record in chains], np.float64)
    if key == "log_p":
        chosen = drawn & (log_p == log_p[drawn].max())
        return chosen / chosen.sum()
    if alpha is None:
        raise ValueError("power needs alpha: see check_key")
    log_q = np.array([record["log_q"] for record in chains], np.float64)
    return PowerVote(alpha=alpha).weights(drawn, log_p, log_q)


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
