"""`dataset=livecodebench` from files in the published format; pickled tests are read, and nothing in them is executed."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
import zlib

import pytest

from tests.refusals import refused

PUBLIC = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
PRIVATE = [{"input": "5\n", "output": "6\n", "testtype": "stdin"}]


def packed(value: object) -> str:
    """A value in the way the published files have their private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


ROW = {"question_title": "Add", "question_content": "Add one.", "platform": "atcoder", "question_id": "abc1_a",
       "contest_id": "abc1", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy",
       "public_test_cases": json.dumps(PUBLIC), "private_test_cases": packed(json.dumps(PRIVATE)), "metadata": "{}"}
CALL = {**ROW, "question_id": "1_x", "starter_code": "class Solution:\n    def add(self, x: int) -> int:\n        ",
        "metadata": json.dumps({"func_name": "add"}), "private_test_cases": json.dumps(PRIVATE)}


@pytest.fixture
def read(make_config, tmp_path):
    """A function from rows to problems: read(row, ..., private=True)."""
    dataset = make_config("dataset=livecodebench", f"dataset.path={tmp_path}/test6.jsonl", "grader=code",
                          "grader.allow_execution=true").dataset

    def of(*rows: dict, private: bool = False):
        (tmp_path / "test6.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return dataclasses.replace(dataset, private_tests=private).problems()

    return of


def test_rows_with_stdin_and_with_a_function(read):
    program, function = read(ROW, CALL)
    assert (program.id, program.subject) == ("abc1_a", "easy")
    assert json.loads(program.answer) == {"inputs": ["1\n"], "outputs": ["2\n"], "fn_name": None}
    assert json.loads(function.answer)["fn_name"] == "add"
    assert program.question.startswith("### Question:\nAdd one.\n\n### Format: Read the inputs from stdin")
    assert f"```python\n{CALL['starter_code']}\n```" in function.question


def test_private_tests_are_added_on_request(read):
    for problem in read(ROW, CALL, private=True):
        assert json.loads(problem.answer)["inputs"] == ["1\n", "5\n"]
        assert json.loads(problem.answer)["outputs"] == ["2\n", "6\n"]


class Attack:
    """A pickle of this object makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


OTHERS = [(Attack, "a pickle with STACK_GLOBAL instead of a single text"), (lambda _: ["a", "b"], "a pickle with EMPTY_LIST"),
          (lambda _: b"x", "SHORT_BINBYTES"), (lambda _: "no json", "row 0 for its private_test_cases: given 'no json'")]


def test_any_other_pickle_is_refused_and_not_executed(read, tmp_path):
    for value, message in OTHERS:
        with refused(message):
            read({**ROW, "private_test_cases": packed(value(tmp_path / "made"))}, private=True)
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Attack(tmp_path / "made")))
    assert (tmp_path / "made").exists()


def test_bad_rows_are_errors_of_one_line(read):
    with refused("row 0 for its public_test_cases: given '[1]'; allowed: JSON with a list of input and output"):
        read({**ROW, "public_test_cases": "[1]"})
    with refused("private_test_cases that cannot be read"):
        read({**ROW, "private_test_cases": "!"}, private=True)
    with refused("row 0 for its metadata: given 'x'; allowed: JSON of a dict"):
        read({**ROW, "metadata": "x"})
    for name in ("public_test_cases", "private_test_cases", "metadata"):
        with refused(f"row 0 for its {name}: given '[["):
            read({**ROW, name: "[" * 100_000}, private=True)
