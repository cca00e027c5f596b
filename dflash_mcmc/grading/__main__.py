"""`python -m dflash_mcmc.grading RECORDS.jsonl`: what each value of `grader.extract` finds in the recorded texts of a run."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from dflash_mcmc.dataset.inputs.sources import lines_of
from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.grading.extraction import RULES, Extraction
from dflash_mcmc.grading.math.pool import MathPool
from dflash_mcmc.grading.verdicts import CORRECT, NO_ANSWER, WRONG
from dflash_mcmc.process import program

COMPARED = {**{name: Extraction((name,)) for name in RULES}, "auto": Extraction(tuple(RULES))}
"""The extractions that are compared, by the value of `grader.extract`."""


class RecordedText(NamedTuple):
    """A model's text and the gold answer of its problem."""

    text: str
    gold: str


def read_texts(path: Path) -> list[RecordedText]:
    """The texts of a run's `records.jsonl`. Raises UserError if it cannot be read, or is another file."""
    try:
        rows = [json.loads(line) for _, line in lines_of(path)]
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error, 120)}") from error
    texts = [RecordedText(row["text"], row["gold"]) for row in rows
             if isinstance(row, dict) and isinstance(row.get("text"), str) and isinstance(row.get("gold"), str)]
    if not texts or len(texts) != len(rows):
        raise UserError(f"{path}: given a file of another kind; allowed: the records.jsonl of a run")
    return texts


def table_of_sources(texts: list[RecordedText], timeout_seconds: float, num_workers: int) -> str:
    """One row per extraction: the share of correct texts, and the numbers by verdict. Raises UserError like MathPool."""
    rows = []
    for name, extraction in COMPARED.items():
        pool = MathPool(timeout_seconds, 4.0, num_workers, extraction=extraction)
        try:
            for index, (text, gold) in enumerate(texts):
                pool.submit(index, text, gold)
            counts = Counter(grade.verdict for _, grade in pool.finished(wait=True))
        finally:
            pool.close()
        others = len(texts) - counts[CORRECT] - counts[WRONG] - counts[NO_ANSWER]
        rows.append([name, f"{100 * counts[CORRECT] / len(texts):.1f} %", counts[CORRECT], counts[WRONG], counts[NO_ANSWER],
                     others])
    headers = ["grader.extract", "correct", "number", "wrong", "no answer", "undecided"]
    return tabulate(rows, headers=headers, tablefmt="github", colalign=("left", *["right"] * 5), disable_numparse=True)


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m dflash_mcmc.grading",
                                   description="Compares the rules that extract an answer on the texts of a run.")
    parser.add_argument("records", type=Path, metavar="RECORDS.jsonl", help="the records.jsonl of a run")
    parser.add_argument("--timeout", type=float, default=8.0, metavar="SECONDS", help="limit on processor time per answer")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of grading processes")
    options = parser.parse_args(arguments)
    texts = read_texts(options.records)
    print(f"{len(texts)} texts\n\n{table_of_sources(texts, options.timeout, options.workers)}")


if __name__ == "__main__":
    main()
