"""`dataset=jsonl`: named fields, unchanged values, and an error of one line for each mistake."""

import json
from pathlib import Path

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.dataset.jsonl import JsonLines
from dflash_mcmc.types import Problem
from tests.refusals import refused

ALL = ("dataset.question_field=q", "dataset.answer_field=a", "dataset.id_field=i", "dataset.level_field=l",
       "dataset.subject_field=s", "dataset.solution_field=w")
ROW = {"q": "Why?", "a": "so", "i": "x-1", "l": 3, "s": "Rules", "w": "Since so."}


def read(folder: Path, row: dict) -> list[Problem]:
    """The problems of one row with all fields, without composing a configuration."""
    file = folder / "row.jsonl"
    file.write_text(json.dumps(row))
    return JsonLines(path=str(file), limit=None, ids=None, shards=None, num_shards=None, max_new_tokens=1, prompt="plain",
                     question_template=None, answer_template=None, messages_field=None, tools_field=None,
                     **dict(text.removeprefix("dataset.").split("=") for text in ALL)).problems()


@pytest.fixture
def made(make_config, tmp_path):
    """A function that returns the configuration for a file of rows: made(rows, override, ...)."""
    def of(rows: list[dict], *overrides: str):
        file = tmp_path / f"rows{len(list(tmp_path.iterdir()))}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_config("dataset=jsonl", f"dataset.path={file}", *overrides)

    return of


def test_fields_by_name(made):
    assert made([ROW], *ALL).dataset.problems() == [Problem("x-1", "Why?", "so", 3, "Rules", "Since so.")]


def test_without_the_optional_fields_rows_are_numbered(made):
    problems = made([{"question": "p", "answer": "1"}, {"question": "q", "answer": "2"}]).dataset.problems()
    assert problems == [Problem("00000", "p", "1"), Problem("00001", "q", "2")]


@pytest.mark.parametrize(("field", "given", "part", "kept"), [
    ("a", 7, 2, "7"), ("a", -12345678901234567890123, 2, "-12345678901234567890123"), ("a", "07", 2, "07"), ("i", 7, 0, "7"),
    ("a", 2.0, 2, "2.0"), ("a", 0.1, 2, "0.1"), ("a", 2e-05, 2, "0.00002"), ("a", 2e16, 2, "20000000000000000"),
    ("l", "5", 3, 5), ("l", "Level 5", 3, 5), ("l", None, 3, None), ("s", None, 4, None), ("w", None, 5, None),
    ("w", "", 5, ""),
])
def test_values(tmp_path, field, given, part, kept):
    [problem] = read(tmp_path, {**ROW, field: given})
    assert problem[part] == kept
    assert type(problem[part]) is type(kept)


@pytest.mark.parametrize(("field", "given", "message"), [
    ("q", 7, "problem 'x-1' has 7 for its question; allowed: a text"),
    ("q", None, "has None for its question"), ("q", "\ud800", "for its question; allowed: a text"),
    ("a", float("nan"), "has nan for its answer; allowed: a text"), ("a", True, "has True for its answer"),
    ("a", None, "has None for its answer"), ("a", ["1"], "has ['1'] for its answer"),
    ("i", None, "has None for its id"), ("i", ["x"], "has ['x'] for its id"), ("i", 1.5, "has 1.5 for its id"),
    ("l", 1.5, "dataset.level_field: problem 'x-1' has 1.5 for its level"), ("l", True, "has True for its level"),
    ("l", "hard", "has 'hard' for its level"), ("s", 3, "has 3 for its subject"), ("w", {}, "has {} for its solution"),
])
def test_wrong_types_are_errors_of_one_line(tmp_path, field, given, message):
    with refused(message):
        read(tmp_path, {**ROW, field: given})


def test_missing_fields_repeated_ids_and_no_path_are_errors_of_one_line(made, make_config):
    with refused("line 2 lacks the field 'l'; it has: q, a, i, s, w; dataset.level_field names this field"):
        made([ROW, {name: value for name, value in ROW.items() if name != "l"}], *ALL).dataset.problems()
    with refused("the id 'x-1' occurs twice"):
        made([ROW, ROW], *ALL).dataset.problems()
    with refused("dataset.path: given None; allowed: a JSON Lines or CSV file"):
        make_config("dataset=jsonl")


def test_the_identity_depends_on_the_problems_and_not_on_file_and_field_names(made):
    """The same problems under other names of file and fields have the same identity; other problems have another."""
    one = identity_hash(made([ROW], *ALL))
    renamed = made([{"question": "Why?", "answer": "so", "number": "x-1", "text": "Since so."}], "dataset.id_field=number",
                   "dataset.solution_field=text")
    assert identity_hash(renamed) == one
    assert identity_hash(made([{**ROW, "a": "no"}], *ALL)) != one
    assert identity_hash(made([ROW], *ALL[:1], "dataset.answer_field=w", *ALL[2:])) != one


@pytest.mark.parametrize(("text", "message"), [
    ("question,answer\nHow much is 1,000 + 1?,1001\n", "line 2 has another number of values"),
    ("question,answer\nWhat is 1 + 1?\n", "line 2 has another number of values"),
    ('question,answer\n"What is ""3"" + 3?,6\n', "dataset.path: cannot read"),
    ("question,gold\nWhat is 1 + 1?,2\n", "rows.csv: line 1 lacks the field 'answer'"), ("", "rows.csv has no rows"),
    ("question,answer,answer\nWhat is 1 + 1?,2,3\n", "two columns have one name")])
def test_a_table_that_would_be_read_as_other_problems_is_refused(make_config, tmp_path, text, message):
    (tmp_path / "rows.csv").write_text(text)
    with refused(message):
        make_config("dataset=jsonl", f"dataset.path={tmp_path}/rows.csv").dataset.problems()


def test_a_long_field_of_a_csv_file_is_read_and_the_limit_of_the_process_stays(tmp_path, make_config):
    import csv

    before = csv.field_size_limit()
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), ("A story. " * 16_000 + "What is 2 + 3?", "5")])
    (problem,) = make_config("dataset=jsonl", f"dataset.path={tmp_path}/rows.csv").dataset.problems()
    assert len(problem.question) > 140_000
    assert csv.field_size_limit() == before
