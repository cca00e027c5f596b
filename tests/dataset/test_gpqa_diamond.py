"""`dataset=gpqa_diamond` from a CSV file with the published columns: options in a fixed random order, and the right letter."""

import csv
import dataclasses
import json

import pytest

from tests.refusals import refused

COLUMNS = ("Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3",
           "High-level domain")
ROWS = [(f"rec{number}", f"Which, {number}?\n", "right\n", "wrong 1", "wrong 2", "wrong 3", "Physics") for number in range(24)]


@pytest.fixture
def read(make_config, tmp_path):
    """A function from fields to the problems of ROWS."""
    with (tmp_path / "gpqa_diamond.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *ROWS])
    dataset = make_config("dataset=gpqa_diamond", f"dataset.path={tmp_path}/gpqa_diamond.csv", "grader=choice").dataset
    return lambda **fields: dataclasses.replace(dataset, **{"check_rows": False, **fields}).problems()


def test_the_gold_letter_is_that_of_the_right_option(read):
    problems = read()
    for number, problem in enumerate(problems):
        question, *options = problem.question.split("\n\n")[0], *problem.question.split("\n\n")[1].split("\n")
        assert question == f"Which, {number}?"
        assert f"{problem.answer}) right" in options
        assert sorted(option[3:] for option in options) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert [option[:3] for option in options] == ["A) ", "B) ", "C) ", "D) "]
    assert {problem.answer for problem in problems} == set("ABCD")
    assert (problems[0].id, problems[0].subject) == ("rec0", "Physics")


def test_the_order_depends_on_the_seed_and_the_id_alone(read):
    assert read() == read(options_seed=0)
    assert [problem.answer for problem in read()] != [problem.answer for problem in read(options_seed=1)]
    assert read(limit=3) == read()[:3]


def test_a_lone_surrogate_is_one_line(read, tmp_path):
    row = dict(zip(COLUMNS, ROWS[0], strict=True))
    for name in COLUMNS[:3]:
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, name: "x\ud800"}))
        with refused(f"dataset.path: row 0 has 'x\\ud800' for its {name}; allowed: a text"):
            read(path=str(tmp_path / "rows.jsonl"))
