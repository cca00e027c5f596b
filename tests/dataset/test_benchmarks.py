"""Benchmarks of mathematics from files: made-up rows, and the real files with published figures and stored fingerprints.

`inputs/test_rows.py` tests what all benchmarks share.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from dflash_mcmc.types import Problem
from tests.refusals import refused

MATH = {"problem": "What is $1+1$?", "answer": "2", "level": 1, "subject": "Algebra", "unique_id": "a/1.json",
        "solution": "It is $\\boxed{2}$."}


@pytest.fixture
def read(make_config, tmp_path):
    """A function from the name of a benchmark and rows to its problems."""
    def of(name: str, *rows: dict) -> list[Problem]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = (f"dataset={name}", f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false")
        return make_config(*given).dataset.problems()

    return of


@pytest.mark.parametrize(("name", "rows", "problems"), [
    ("aime24", [{"id": 67, "problem": "q", "solution": "s", "answer": "025", "url": "u"}], [("aime24-67", "q", "025")]),
    ("aime25", [{"problem": q, "answer": "007"} for q in "pq"], [("aime25-00", "p", "007"), ("aime25-01", "q", "007")]),
    ("gsm8k", [{"question": "q", "answer": "Work 1+1=<<1+1=2>>2\n#### 1,234"}, {"question": "r", "answer": "#### -5"}],
     [("gsm8k-0000", "q", "1234"), ("gsm8k-0001", "r", "-5")]),
    ("math500", [MATH, {**MATH, "unique_id": "b", "answer": "\\{1\\}"}],
     [("a/1.json", MATH["problem"], "2"), ("b", MATH["problem"], "\\{1\\}")])])
def test_ids_questions_and_gold_answers(read, name, rows, problems):
    assert [tuple(problem[:3]) for problem in read(name, *rows)] == problems


def test_math500_has_levels_subjects_and_solutions(read):
    assert read("math500", MATH) == [Problem("a/1.json", MATH["problem"], "2", 1, "Algebra", MATH["solution"])]


@pytest.mark.parametrize(("name", "row", "message"), [
    ("gsm8k", {"question": "q", "answer": "2"}, "row 0 has no final answer"),
    *(("math500", {**MATH, field: value}, f"has {value!r} for its {shown}; allowed: {allowed}")
      for field, value, shown, allowed in [("problem", None, "question", "a text"), ("answer", 2, "answer", "a text"),
                                           ("unique_id", 7, "id", "a text"), ("level", "1", "level", "a whole number")])])
def test_bad_rows_are_errors_of_one_line(read, name, row, message):
    with refused(message):
        read(name, row)


AIME25 = (70, 588, 16, 117, 279, 504, 821, 77, 62, 81, 259, 510, 204, 60, 735,
          468, 49, 82, 106, 336, 293, 237, 610, 149, 907, 113, 19, 248, 104, 240)
"""Answers of AIME I and II 2025, in the order of the examination."""
REAL = {  # file, the first and the last id, and the fingerprint
    "aime24": ("aime2024", "aime24-60", "aime24-89", "d229d53aa6a0dadddb074dcbb6e2f365"),
    "aime25": ("aime2025", "aime25-00", "aime25-29", "c1289ecc6cc504a1e09f31abc06b3318"),
    "gsm8k": ("gsm8k", "gsm8k-0000", "gsm8k-1318", "536b7bd32077b6bc104c07394b4d0ecc"),
    "math500": ("math500", "test/precalculus/807.json", "test/geometry/615.json", "22ee0c9910b9b1e7ac852ff5a83bf4e3")}


@pytest.mark.parametrize("name", REAL)
def test_all_real_problems(make_config, shared_data, name):
    folder, first, last, fingerprint = REAL[name]
    dataset = make_config(f"dataset={name}", f"dataset.path={shared_data}/{folder}/test.jsonl").dataset
    problems = dataset.problems()
    assert (problems[0].id, problems[-1].id, dataset.fingerprint()) == (first, last, fingerprint)
    assert len({problem.id for problem in problems}) == len(problems) == dataset.num_published == dataset.num_chosen()
    golds = [problem.answer for problem in problems]
    if name == "aime24":
        assert all(len(problem.answer) == 3 and problem.answer.isdigit() and problem.solution for problem in problems)
        assert [gold for gold in golds if gold[0] == "0"] == ["025", "073", "023", "045", "033", "080", "055"]
    elif name == "aime25":
        assert tuple(map(int, golds)) == AIME25
        assert {(problem.level, problem.subject, problem.solution) for problem in problems} == {(None, None, None)}
    elif name == "gsm8k":
        assert all(gold.lstrip("-").isdigit() for gold in golds)
        written = [problem.solution.rpartition("#### ")[2] for problem in problems]
        assert (sum("," in gold for gold in written), sum("-" in gold for gold in written)) == (14, 2)
        assert golds == [gold.replace(",", "") for gold in written]
    else:
        assert Counter(problem.level for problem in problems) == dict(enumerate((43, 90, 105, 128, 134), start=1))
        assert Counter(problem.subject for problem in problems) == {
            "Algebra": 124, "Intermediate Algebra": 97, "Prealgebra": 82, "Number Theory": 62, "Precalculus": 56,
            "Geometry": 41, "Counting & Probability": 38}
        assert sum(re.fullmatch(r"-?\d+", gold) is not None for gold in golds) == 311
        assert all("boxed" in problem.solution for problem in problems)
