"""Grading: rules that decide whether an answer is right, and walls around what has to be run to find out.

The components of `grader/` are their settings. `comparing` has the rules of mathematics, `pool` the processes they run in;
`programs` and `sandbox` run code; `letters` reads choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dflash_mcmc.grader import Grader
    from dflash_mcmc.types import Problem

VERSION = 4
"""Raised when a rule changes, so that records of another grader are not continued, and each record says which one it is of."""


def label(grader: Grader) -> str:
    """Name and version of a grader's component, `math 2`, as records have it; the name alone where it states no version."""
    from dflash_mcmc.registry import name_of

    return name_of(grader) if grader.version is None else f"{name_of(grader)} {grader.version}"


def check_golds(grader: Grader, problems: Iterable[Problem]) -> None:
    """Raises UserError for a gold answer that this grader cannot compare a text with: before anything is drawn."""
    for problem in problems:
        grader.check_gold(problem.answer)
