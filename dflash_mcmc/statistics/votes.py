"""The votes of a problem's chains, and the expected result of a vote over fewer chains.

The docstring of `chains.py` defines a vote.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash_mcmc.grading.math.string_rule import normal_form

if TYPE_CHECKING:
    from dflash_mcmc.store.records import Record


class Candidate(NamedTuple):
    """An answer that received votes."""

    answer: str
    """Its most frequent text; in a tie, the first one."""
    number: int
    correct: bool
    """Whether any of its texts was graded correct."""


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
        correct = {normal_form(text) for text, record in zip(texts, chains, strict=True) if record["verdict"] == "correct"}
        found: dict[str, Counter[str]] = {}
        for text in filter(None, texts):
            found.setdefault(normal_form(text), Counter())[text] += 1
        candidates = [Candidate(votes.most_common(1)[0][0], votes.total(), vote in correct) for vote, votes in found.items()]
        places = {vote: place for place, vote in enumerate(found)}
        return cls(tuple(candidates), texts.count(""), tuple(places[normal_form(text)] if text else -1 for text in texts))

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
    values = np.zeros(len(ks))
    for place, votes in enumerate(counts.correct):
        others = counts.correct[:place] + counts.correct[place + 1:] + counts.wrong
        values += _expected_win(votes, others, counts.silent, ks)
    return tuple(values.clip(0.0, 1.0).tolist())


def _expected_win(own: int, others: tuple[int, ...], silent: int, ks: tuple[int, ...]) -> np.ndarray:
    """For each k, the mean of 1 / winners if this answer wins, else 0, over all ways to choose k of the chains.

    The ways are counted, not enumerated. For each number j of votes for this answer, an array counts the ways that give every
    other answer at most j votes. Its axes are the number of chains taken and the number of other answers with exactly j votes.
    """
    size, values = own + sum(others) + silent, np.zeros(len(ks))
    for j in range(1, own + 1):
        ways = np.zeros((size + 1, len(others) + 1))  # [chains taken, other answers with j votes]
        ways[0, 0] = 1.0
        for votes in others:
            ways = _with_answer(ways, votes, j)
        fair = ways @ (1.0 / np.arange(1, len(others) + 2))
        fair = _with_answer(fair[:, None], silent, size + 1)[:, 0]  # chains that do not vote are not limited
        for place, k in enumerate(ks):
            if k >= j:
                values[place] += math.comb(own, j) * fair[k - j] / math.comb(size, k)
    return values


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
