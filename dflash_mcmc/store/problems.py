"""The questions and prompts of a run's problems: `problems.jsonl`, with one line for each problem.

The file is replaced as a whole and under the lock of the folder. So it is never partial, and processes that share a run write
each problem once. A process writes it before its first record, so that every record's problem is in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.files import write_atomically

PROBLEMS = "problems.jsonl"


class ProblemText(TypedDict):
    """A line of the file."""

    id: str
    """Id of the problem: `problem` of its records."""
    question: str
    """The question; for a conversation the last turn of the user."""
    gold: str
    """The correct answer as the dataset writes it."""
    prompt: str
    """The text that the model continues, before the tokenizer adds special tokens of its own."""


def read_problems(folder: Path) -> dict[str, ProblemText]:
    """The problems of a run by their ids; empty for a run of an older version. Raises UserError for a corrupt file."""
    path = folder / PROBLEMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    try:
        return {problem["id"]: problem for problem in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be parsed ({type(error).__name__}); delete it, and the next start of the run writes "
                        "it again") from error


def add_problems(folder: Path, missing: Callable[[Collection[str]], Sequence[ProblemText]]) -> None:
    """Adds the problems that the file lacks. The caller holds the lock of the folder. Raises UserError.

    Args:
        missing: returns the run's problems except those with the given ids.
    """
    known = read_problems(folder)
    if new := missing(known.keys()):
        write_atomically(folder / PROBLEMS, as_lines([*known.values(), *new]))


def as_lines(problems: Iterable[ProblemText]) -> str:
    """The content of the file."""
    return "".join(json.dumps(problem, ensure_ascii=True) + "\n" for problem in problems)
