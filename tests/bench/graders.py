"""`python -m tests.bench.graders PAIRS.jsonl` prints the error rates and speed of several graders on labelled pairs.

A pair is one line of JSON with `gold`, `answer`, `equal` (true or false) and, optionally, `family`. Errors are also counted
for each family. A line with `answer` and `solution`, as in MATH-500, gives up to three equal pairs: the gold answer with
itself, with itself in braces, and with the last box of the solution if the solution has a box.
"""

import json
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from dflash_mcmc.dataset.inputs.sources import lines_of
from dflash_mcmc.errors import UserError, reason_of
from dflash_mcmc.grading.extraction import last_box
from dflash_mcmc.grading.math.pool import MathPool, judge, within
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import CORRECT, WRONG, Decision
from dflash_mcmc.process import program
from dflash_mcmc.types import Grade


def exact_string(gold: str, answer: str, question: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """Accepts an answer only if it is the same string as the gold answer."""
    return _decision(gold == answer, "exact"), same_string(gold, answer)


def string_rule(gold: str, answer: str, question: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """The string rule: PRM800K's normalisation without its algebra."""
    same = same_string(gold, answer)
    return _decision(same, "string"), same


def math_verify_bare(gold: str, answer: str, question: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """math-verify as its documentation shows it, on the unchanged answers."""
    return within(cpu_seconds, partial(_math_verify, mark=""), gold, answer), same_string(gold, answer)


def math_verify_dollars(gold: str, answer: str, question: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """math-verify with `$` around both answers, so that it reads them as LaTeX."""
    return within(cpu_seconds, partial(_math_verify, mark="$"), gold, answer), same_string(gold, answer)


def _math_verify(gold: str, answer: str, mark: str) -> Decision:
    from math_verify import parse, verify

    sides = [parse(f"{mark}{side}{mark}", parsing_timeout=None) for side in (gold, answer)]
    return _decision(verify(*sides, timeout_seconds=None), "math-verify")


def _decision(equal: bool, rule: str) -> Decision:
    return Decision(CORRECT if equal else WRONG, rule)


RIVALS = {
    "exact string": exact_string, "string rule (PRM800K's strings)": string_rule, "math-verify, bare": math_verify_bare,
    "math-verify, $...$": math_verify_dollars, "grader=math": judge,
}
"""Graders with the signature of `judge`, by the name in the tables."""


class Pair(NamedTuple):
    """Two answers, and whether they are equal."""

    gold: str
    answer: str
    equal: bool
    family: str


class GraderResult(NamedTuple):
    """The grades of one grader, in the order of the pairs, and the time they took."""

    grades: list[Grade]
    seconds: float


def read_pairs(path: Path) -> list[Pair]:
    """Reads the pairs of a file. Raises UserError if the file cannot be read, has an invalid line, or is empty."""
    pairs = []
    try:
        lines = list(lines_of(path))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error, 120)}") from error
    for line_number, line in lines:
        try:
            new = _pairs_of(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: line {line_number} is not a pair; allowed: JSON with gold, answer and equal, or with "
                            "answer and solution") from error
        for pair in new:
            if not (isinstance(pair.gold, str) and isinstance(pair.answer, str) and isinstance(pair.equal, bool)):
                raise UserError(f"{path}: line {line_number}: gold and answer must be strings, equal must be true or false")
        pairs += new
    if not pairs:
        raise UserError(f"{path}: contains no pairs")
    return pairs


def _pairs_of(row: dict) -> list[Pair]:
    if "solution" not in row:
        return [Pair(row["gold"], row["answer"], row["equal"], row.get("family", "all"))]
    gold, box = row["answer"], last_box(row["solution"])
    pairs = [Pair(gold, gold, True, "itself"), Pair(gold, f"{{ {gold} }}", True, "in braces")]
    return pairs if box is None else [*pairs, Pair(gold, box, True, "its solution's box")]


def run_grader(name: str, pairs: list[Pair], timeout_seconds: float, num_workers: int) -> GraderResult:
    """Grades the pairs with the grader called `name` in RIVALS. The time excludes the start of the processes.

    Raises UserError if the grading processes do not work.
    """
    pool = MathPool(timeout_seconds, 4.0, num_workers, RIVALS[name])
    try:
        pool.submit_answer(-1, "1", "1")
        list(pool.finished(wait=True))
        started = time.perf_counter()
        for index, pair in enumerate(pairs):
            pool.submit_answer(index, pair.answer, pair.gold)
        grades = dict(pool.finished(wait=True))
        return GraderResult([grades[index] for index in range(len(pairs))], time.perf_counter() - started)
    finally:
        pool.close()


def table(pairs: list[Pair], results: dict[str, GraderResult]) -> str:
    """One row per grader: accuracy, numbers of false accepts, false rejects and undecided pairs, answers per second."""
    rows = []
    for name, (grades, seconds) in results.items():
        accepted = [(grade.verdict == CORRECT, pair.equal) for grade, pair in zip(grades, pairs, strict=True)]
        undecided = sum(grade.verdict not in (CORRECT, WRONG) for grade in grades)
        rows.append([name, f"{100 * sum(accept == equal for accept, equal in accepted) / len(pairs):.1f} %",
                     accepted.count((True, False)), accepted.count((False, True)), undecided, f"{len(pairs) / seconds:,.0f}"])
    headers = ["grader", "accuracy", "false accepts", "false rejects", "undecided", "answers/s"]
    return tabulate(rows, headers=headers, tablefmt="github", colalign=("left", *["right"] * 5), disable_numparse=True)


def families(pairs: list[Pair], results: dict[str, GraderResult]) -> str:
    """Table of the false accepts / false rejects: one row per family, one column per grader."""
    sizes = Counter(pair.family for pair in pairs)
    cells: Counter[tuple[str, str, bool]] = Counter()
    for name, result in results.items():
        for grade, pair in zip(result.grades, pairs, strict=True):
            cells[name, pair.family, grade.verdict == CORRECT] += (grade.verdict == CORRECT) != pair.equal
    rows = [[f"{family} ({size})", *(f"{cells[name, family, True]}/{cells[name, family, False]}" for name in results)]
            for family, size in sizes.items()]
    return tabulate(rows, headers=["family (pairs)", *results], tablefmt="github", disable_numparse=True,
                    colalign=("left", *["right"] * len(results)))


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m tests.bench.graders",
                                   description="Compares this grader with others on labelled pairs of answers.")
    parser.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="lines of JSON with gold, answer, equal and family, "
                        "or with answer and solution")
    parser.add_argument("--timeout", type=float, default=8.0, metavar="SECONDS", help="limit on processor time per pair")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of grading processes")
    options = parser.parse_args(arguments)
    pairs = read_pairs(options.pairs)
    results = {name: run_grader(name, pairs, options.timeout, options.workers) for name in RIVALS}
    print(f"{len(pairs)} pairs, {sum(pair.equal for pair in pairs)} of them equal\n\n{table(pairs, results)}")
    print(f"\nfalse accepts / false rejects\n\n{families(pairs, results)}")
    for grade, pair in zip(results["grader=math"].grades, pairs, strict=True):
        if (grade.verdict == CORRECT) != pair.equal:
            sign = "=" if pair.equal else "!="
            print(f"\ngrader=math is wrong: {pair.gold} {sign} {pair.answer}: {grade.verdict}, {grade.rule}")


if __name__ == "__main__":
    main()
