"""The questions and prompts of a run's problems: `problems.jsonl`, with one line for each problem.

The file is replaced as a whole and under the lock of the folder. So it is never partial, and processes that share a run write
each problem once. A process writes it before its first record, so that every record's problem is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict, cast

from dflash_mcmc.errors import UserError
from dflash_mcmc.store.files import read_regular, write_atomically
from dflash_mcmc.store.lines import Damaged, from_line, to_line, whole_lines
from dflash_mcmc.store.schema import Schema

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
    """The problems of a run by their ids; empty for a run of an older version. Raises UserError for a damaged file."""
    path, found = folder / PROBLEMS, dict[str, ProblemText]()
    for number, line in enumerate(whole_lines(read_regular(path) or b"")[0], start=1):
        try:
            value = from_line(line).value
            if fault := _schema().fault(value):
                raise Damaged(fault)
        except Damaged as error:
            raise UserError(f"{path}: line {number}: {error}; delete the file, and the next start of the run writes it "
                            "again") from error
        problem = cast(ProblemText, value)
        found[problem["id"]] = problem
    return found


def add_problems(folder: Path, missing: Callable[[Collection[str]], Sequence[ProblemText]]) -> None:
    """Adds the problems that the file lacks. The caller holds the lock of the folder. Raises UserError.

    Args:
        missing: returns the run's problems except those with the given ids.
    """
    known = read_problems(folder)
    if new := missing(known.keys()):
        write_atomically(folder / PROBLEMS, as_lines([*known.values(), *new]))


def as_lines(problems: Iterable[ProblemText]) -> bytes:
    """The content of the file."""
    return b"".join(map(to_line, problems))


@cache
def _schema() -> Schema:
    return Schema(ProblemText, key=("id",))
