"""`dataset=mbpp` from files with the columns of the full and of the sanitized version."""

import dataclasses
import json

import pytest

from dflash_mcmc.chains.build import first_prompt
from dflash_mcmc.config.identity import identity_of
from dflash_mcmc.types import Example, Problem
from tests.refusals import refused

FULL = {"text": "Write a function to add one.", "code": "def f(x):\n    return x + 1", "task_id": 11, "test_setup_code": "",
        "test_list": ["assert f(1) == 2", "assert f(2) == 3"], "challenge_test_list": []}
SANITIZED = {"prompt": FULL["text"], "code": FULL["code"], "task_id": 12, "test_imports": ["import math"],
             "test_list": FULL["test_list"], "source_file": "x"}
TESTS = "assert f(1) == 2\nassert f(2) == 3\n"


@pytest.fixture
def read(make_config, tmp_path):
    """A function from rows to the configuration for their file."""
    def of(*rows: dict, grader: tuple[str, ...] = ("grader=code", "grader.allow_execution=true"), **more: int | str):
        (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_config("dataset=mbpp", f"dataset.path={tmp_path}/mbpp.jsonl", "dataset.check_rows=false", *grader,
                           *(f"dataset.{name}={value}" for name, value in more.items()))

    return of


def test_rows_of_both_versions(read):
    full, sanitized = read(FULL, SANITIZED).dataset.problems()
    question = f"Write a function to add one. Your code should pass these tests:\n\n{TESTS}"
    assert full == Problem("mbpp-11", question, json.dumps({"test_list": FULL["test_list"]}), solution=FULL["code"],
                           examples=(Example("f(1)", "assert f(1) == 2"), Example("f(2)", "assert f(2) == 3")))
    assert json.loads(sanitized.answer) == {"test_list": FULL["test_list"], "test_imports": ["import math"]}


def test_one_test_is_shown_and_the_others_decide(read):
    [problem] = read(FULL, shown="first").dataset.problems()
    assert problem.question == "Write a function to add one. Your code should pass this test:\n\nassert f(1) == 2\n"
    assert problem.examples == (Example("f(1)", "assert f(1) == 2"),)
    assert json.loads(problem.answer) == {"test_list": ["assert f(2) == 3"]}
    assert identity_of(read(FULL, shown="first"))["dataset.shown"] == "first"
    assert "dataset.shown" not in identity_of(read(FULL))  # as before there was a choice


def test_the_test_split_of_all_rows_is_read(read, shared_data):
    config = read(FULL, shown="first")
    dataset = dataclasses.replace(config.dataset, path=f"{shared_data}/mbpp/mbpp.jsonl", check_rows=True)
    problems = dataset.all_problems()
    assert [problem.id for problem in problems] == [f"mbpp-{number}" for number in range(11, 511)]
    assert all(problem.examples[0].check in problem.question for problem in problems)
    shown_again = [problem.id for problem in problems if problem.examples[0].check in json.loads(problem.answer)["test_list"]]
    assert shown_again == ["mbpp-37", "mbpp-337", "mbpp-508"]  # the published rows repeat their first test


def test_the_examples_of_programs_are_programs(read):
    prompt = first_prompt(read(FULL, {**FULL, "task_id": 13, "text": "Add 1."}, fewshot=1))
    assert f"here is your task: Add 1. Your code should pass these tests:\n\n{TESTS}" in prompt
    assert f"<|im_start|>assistant\n{FULL['code']}<|im_end|>" in prompt


def test_bad_rows_and_graders_are_errors_of_one_line(read):
    for row, message in (({"test_list": []}, "[] for its test_list; allowed: a list of texts"),
                         ({"text": None}, "None for its text or prompt"),
                         ({"test_list": ["assert 1"]}, "'assert 1' for a test; allowed: an assertion that calls a function")):
        with refused(f"row 0 has {message}"):
            read({**FULL, **row}).dataset.problems()
    with refused("row 0 has one test, which shown=first would show; allowed: all"):
        read({**FULL, "test_list": FULL["test_list"][:1]}, shown="first").dataset.problems()
    with refused("grader: given 'math'; allowed: code, with dataset=mbpp"):
        read(FULL, grader=())
