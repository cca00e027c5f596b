"""Compares the extraction rules of `grader=math` on recorded texts: how many answers each finds, and how many are correct."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from dflash_mcmc.dataset.inputs.rows import lines_of
from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.grading.extraction import RULES, Extraction
from dflash_mcmc.grading.math.pool import MathPool
from dflash_mcmc.grading.verdicts import CORRECT, NO_ANSWER, WRONG

COMPARED = {**{name: Extraction((name,)) for name in RULES}, "auto": Extraction(tuple(RULES))}
"""The extractions that are compared, by the value of `grader.extract`."""


class RecordedText(NamedTuple):
    """A model's text and the gold answer of its problem."""

    text: str
    gold: str


def read_texts(path: Path) -> list[RecordedText] | None:
    """The texts of a run's `records.jsonl`; None for a file of another kind. Raises UserError if it cannot be read."""
    try:
        rows = [json.loads(line) for _, line in lines_of(path)]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error, 120)}") from error
    except (ValueError, RecursionError):
        return None
    found = [RecordedText(row["text"], row["gold"]) for row in rows
             if isinstance(row, dict) and isinstance(row.get("text"), str) and isinstance(row.get("gold"), str)]
    return found if found and len(found) == len(rows) else None


def table(texts: list[RecordedText], timeout_seconds: float, num_workers: int) -> str:
    """One row per extraction: the share of correct texts, and the numbers by verdict. Raises UserError like MathPool."""
    rows = []
    for name, extraction in COMPARED.items():
        pool = MathPool(timeout_seconds, 4.0, num_workers, extraction=extraction)
        try:
            for number, (text, gold) in enumerate(texts):
                pool.submit(number, text, gold)
            counts = Counter(grade.verdict for _, grade in pool.finished(wait=True))
        finally:
            pool.close()
        others = len(texts) - counts[CORRECT] - counts[WRONG] - counts[NO_ANSWER]
        rows.append([name, f"{100 * counts[CORRECT] / len(texts):.1f} %", counts[CORRECT], counts[WRONG], counts[NO_ANSWER],
                     others])
    headers = ["grader.extract", "correct", "number", "wrong", "no answer", "undecided"]
    return tabulate(rows, headers=headers, tablefmt="github", colalign=("left", *["right"] * 5), disable_numparse=True)
