"""The input of paired statistics: for each problem, the share of its chains that are correct."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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


def score(record: dict) -> float:
    """1 for a correct record, 0 for any other; for a record combined from several chains its field `correct`, in [0, 1]."""
    return float(record["correct"]) if "correct" in record else float(record["verdict"] == "correct")


def by_problem(records: Sequence[dict]) -> dict[str, list[dict]]:
    """The records of each problem; problems are in order of first appearance."""
    found = defaultdict(list)
    for record in records:
        found[record["problem"]].append(record)
    return dict(found)


def outcomes(records: Sequence[dict]) -> PairedOutcomes:
    """The outcomes of a run's records; problems are in order of first appearance."""
    scores = {problem: [score(record) for record in chains] for problem, chains in by_problem(records).items()}
    return PairedOutcomes(tuple(scores), np.array([sum(found) / len(found) for found in scores.values()], np.float64),
                    np.array([len(found) for found in scores.values()], np.int64))


def restricted(of: PairedOutcomes, problems: Sequence[str]) -> PairedOutcomes:
    """The outcomes of these problems, in this order. Raises KeyError for an unknown problem."""
    place = {problem: number for number, problem in enumerate(of.problems)}
    chosen = np.array([place[problem] for problem in problems], dtype=np.int64)
    return PairedOutcomes(tuple(problems), of.correct[chosen], of.chains[chosen])


def aligned(a: PairedOutcomes, b: PairedOutcomes) -> tuple[PairedOutcomes, PairedOutcomes, int]:
    """Both on their common problems, in the order of `a`; and the number of problems of either that were left out."""
    known = set(b.problems)
    shared = [problem for problem in a.problems if problem in known]
    return restricted(a, shared), restricted(b, shared), len(a.problems) + len(b.problems) - 2 * len(shared)
