"""`python -m dflash_mcmc.grading PAIRS.jsonl`: how often this grader and others are wrong on labelled pairs, and how fast they
are, as a table.

A pair is a line of JSON: `gold`, `answer`, `equal` (true or false), and `family` where errors are to be told by family. A line
of a dataset that has `answer` and `solution`, as MATH-500's, is three pairs: the gold answer and itself, as it is and in
braces, and the last box of its solution where that has one.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import last_box
from dflash_mcmc.grading.math.pool import MathPool
from dflash_mcmc.grading.math.rivals import RIVALS
from dflash_mcmc.grading.verdicts import CORRECT, WRONG
from dflash_mcmc.process import program
from dflash_mcmc.types import Grade


class Pair(NamedTuple):
    """Two answers, and whether they are equal."""

    gold: str
    answer: str
    equal: bool
    family: str


class Asked(NamedTuple):
    """What a grader said of the pairs, in their order."""

    grades: list[Grade]
    seconds: float


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file. Raises UserError, of one line."""
    pairs = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            found = _pairs_of(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: line {number} is no pair; allowed: JSON with gold, answer and equal, or with answer and "
                            "solution") from error
        for pair in found:
            if not (isinstance(pair.gold, str) and isinstance(pair.answer, str) and isinstance(pair.equal, bool)):
                raise UserError(f"{path}: line {number}: gold and answer are texts, equal is true or false")
        pairs += found
    if not pairs:
        raise UserError(f"{path}: holds no pair")
    return pairs


def _pairs_of(row: dict) -> list[Pair]:
    if "solution" not in row:
        return [Pair(row["gold"], row["answer"], row["equal"], row.get("family", "all"))]
    gold, box = row["answer"], last_box(row["solution"])
    pairs = [Pair(gold, gold, True, "itself"), Pair(gold, f"{{ {gold} }}", True, "in braces")]
    return pairs if box is None else [*pairs, Pair(gold, box, True, "its solution's box")]


def ask(name: str, pairs: list[Pair], timeout_seconds: float, num_workers: int) -> Asked:
    """What a grader says of the pairs. The time is without the start of the processes. Raises UserError."""
    pool = MathPool(timeout_seconds, 4.0, num_workers, RIVALS[name])
    try:
        pool.submit_answer(-1, "1", "1")
        list(pool.finished(wait=True))
        started = time.perf_counter()
        for number, pair in enumerate(pairs):
            pool.submit_answer(number, pair.answer, pair.gold)
        found = dict(pool.finished(wait=True))
        return Asked([found[number] for number in range(len(pairs))], time.perf_counter() - started)
    finally:
        pool.close()


def table(pairs: list[Pair], asked: dict[str, Asked]) -> str:
    """A row a grader: accuracy, wrong acceptances and rejections, what was not decided, answers a second."""
    rows = []
    for name, (grades, seconds) in asked.items():
        accepted = [(grade.verdict == CORRECT, pair.equal) for grade, pair in zip(grades, pairs, strict=True)]
        undecided = sum(grade.verdict not in (CORRECT, WRONG) for grade in grades)
        rows.append([name, f"{100 * sum(said == is_so for said, is_so in accepted) / len(pairs):.1f} %",
                     accepted.count((True, False)), accepted.count((False, True)), undecided, f"{len(pairs) / seconds:,.0f}"])
    headers = ["grader", "right", "false accepts", "false rejects", "not decided", "answers/s"]
    return tabulate(rows, headers=headers, tablefmt="github", colalign=("left", *["right"] * 5), disable_numparse=True)


def families(pairs: list[Pair], asked: dict[str, Asked]) -> str:
    """False accepts / false rejects of each grader in each family."""
    sizes = Counter(pair.family for pair in pairs)
    cells = Counter()
    for name, said in asked.items():
        for grade, pair in zip(said.grades, pairs, strict=True):
            cells[name, pair.family, grade.verdict == CORRECT] += (grade.verdict == CORRECT) != pair.equal
    rows = [[f"{family} ({size})", *(f"{cells[name, family, True]}/{cells[name, family, False]}" for name in asked)]
            for family, size in sizes.items()]
    return tabulate(rows, headers=["family (pairs)", *asked], tablefmt="github", disable_numparse=True,
                    colalign=("left", *["right"] * len(asked)))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits."""
    program.run(_main, arguments)


def _main(arguments: list[str]) -> None:
    parser = program.OneLineParser("python -m dflash_mcmc.grading",
                            description="This grader and others on labelled pairs of answers.")
    parser.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="lines of JSON: gold, answer, equal and family, or "
                        "answer and solution")
    parser.add_argument("--timeout", type=float, default=8.0, metavar="SECONDS", help="of processor time for a pair")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="grading processes")
    given = parser.parse_args(arguments)
    pairs = read_pairs(given.pairs)
    asked = {name: ask(name, pairs, given.timeout, given.workers) for name in RIVALS}
    print(f"{len(pairs)} pairs, {sum(pair.equal for pair in pairs)} of them equal\n\n{table(pairs, asked)}")
    print(f"\nfalse accepts / false rejects\n\n{families(pairs, asked)}")
    for grade, pair in zip(asked["grader=math"].grades, pairs, strict=True):
        if (grade.verdict == CORRECT) != pair.equal:
            sign = "=" if pair.equal else "!="
            print(f"\ngrader=math is wrong: {pair.gold} {sign} {pair.answer}: {grade.verdict}, {grade.rule}")


if __name__ == "__main__":
    main()
