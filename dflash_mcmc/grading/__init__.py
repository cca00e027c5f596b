"""Grading: the rules that decide whether an answer is correct, and the isolation of untrusted code that grading runs.

The components in `grader/` hold the settings. `math/comparing` has the rules for mathematical answers and `math/pool` the
processes that apply them; `code/programs` and `code/sandbox` run programs; `choice/letters` reads multiple-choice answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dflash_mcmc.grader import Grader
    from dflash_mcmc.types import Problem

VERSION = 4
"""Version of the rules. Increase it with every change of a rule: a run with grades of another version is not continued, and
each record states the version of its grade."""


def label(grader: Grader) -> str:
    """Name and version of a grader component as records store them, e.g. `math 2`; only the name if it has no version."""
    from dflash_mcmc.registry import name_of

    return name_of(grader) if grader.version is None else f"{name_of(grader)} {grader.version}"


def check_golds(grader: Grader, problems: Iterable[Problem]) -> None:
    """Checks the gold answers before sampling starts. Raises UserError if this grader cannot compare with one of them."""
    for problem in problems:
        grader.check_gold(problem.answer)
