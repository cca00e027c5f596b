"""`dataset=math500` from a file: the real rows if they are available, and made-up rows for errors."""

import json
import re
from collections import Counter

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.types import Problem

ROWS = [{"problem": "What is $1+1$?", "answer": "2", "level": 1, "subject": "Algebra", "unique_id": "a/1.json",
         "solution": "It is $\\boxed{2}$."},
        {"problem": "What is $\\{1\\}$?", "answer": "\\{1\\}", "level": 5, "subject": "Sets", "unique_id": "b/2.json",
         "solution": ""}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"dataset.path={path}"


ANY_NUMBER = "dataset.check_rows=false"


def test_reads_a_file(make_config, tmp_path):
    dataset = make_config("dataset=math500", write(tmp_path / "rows.jsonl", ROWS), ANY_NUMBER).dataset
    first, second = dataset.problems()
    assert first == Problem("a/1.json", "What is $1+1$?", "2", 1, "Algebra", "It is $\\boxed{2}$.")
    assert second.answer == "\\{1\\}"
    limited = make_config("dataset=math500", f"dataset.path={tmp_path}/rows.jsonl", "dataset.limit=1", ANY_NUMBER).dataset
    assert limited.problems() == [first]


@pytest.mark.parametrize(("field", "value", "allowed"), [
    ("problem", None, "a text"), ("answer", 2, "a text"), ("unique_id", 7, "a text"), ("level", "1", "a whole number")])
def test_wrong_types_are_errors_of_one_line(make_config, tmp_path, field, value, allowed):
    path = write(tmp_path / "rows.jsonl", [{**ROWS[0], field: value}])
    with pytest.raises(UserError) as caught:
        make_config("dataset=math500", path, ANY_NUMBER).dataset.problems()
    assert f"has {value!r} for its " in str(caught.value)
    assert str(caught.value).endswith(f"; allowed: {allowed}")
    assert "\n" not in str(caught.value)


def test_another_number_of_rows_is_refused(make_config, tmp_path):
    dataset = make_config("dataset=math500", write(tmp_path / "rows.jsonl", ROWS)).dataset
    for read in (dataset.problems, dataset.fingerprint):
        with pytest.raises(UserError, match=r"rows.jsonl has 2 rows; allowed: the benchmark's 500, or any number with"):
            read()


def test_all_real_problems(make_config, shared_data):
    dataset = make_config("dataset=math500", f"dataset.path={shared_data}/math500/test.jsonl").dataset
    problems = dataset.problems()
    assert len(problems) == 500 == dataset.num_chosen()
    assert len({p.id for p in problems}) == 500
    levels = [sum(p.level == level for p in problems) for level in range(1, 6)]
    assert levels == [43, 90, 105, 128, 134]
    assert Counter(problem.subject for problem in problems) == {
        "Algebra": 124, "Intermediate Algebra": 97, "Prealgebra": 82, "Number Theory": 62, "Precalculus": 56, "Geometry": 41,
        "Counting & Probability": 38}
    assert sum(re.fullmatch(r"-?\d+", problem.answer) is not None for problem in problems) == 311
    assert all("boxed" in problem.solution for problem in problems)
    assert problems[0].id == "test/precalculus/807.json"
    assert dataset.fingerprint() == "22ee0c9910b9b1e7ac852ff5a83bf4e3"
