"""`dataset=humaneval`: the questions, and the programs that a grader runs."""

import ast
import json

import pytest

from dflash_mcmc.chains.build import first_prompt
from dflash_mcmc.types import Problem
from tests.refusals import refused

UNGRADED = ("probe=deep_readout", "probe.answers=greedy", "draft=tiny", "dataset=humaneval")
ROW = {"task_id": "HumanEval/0", "prompt": 'def one():\n    """ 1 """\n', "entry_point": "one",
       "canonical_solution": "    return 1\n", "test": "def check(candidate):\n    assert candidate() == 1\n"}


@pytest.fixture
def read(make_config, tmp_path):
    """A function that returns the configuration for a file of one row: read(row, override, ...)."""
    def of(row: dict, *overrides: str):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        return make_config(*UNGRADED, f"dataset.path={tmp_path}/rows.jsonl", "dataset.check_rows=false", *overrides)

    return of


def test_a_row(read):
    [problem] = read(ROW).dataset.problems()
    assert problem._replace(answer="") == Problem("HumanEval/0", ROW["prompt"], "", solution=ROW["canonical_solution"])
    assert json.loads(problem.answer) == {name: ROW[name] for name in ("prompt", "test", "entry_point")}


def test_a_chat_model_is_asked_for_a_code_block_and_a_base_model_continues_the_prompt(read):
    block = f"```python\n{ROW['prompt']}\n```"
    assert first_prompt(read(ROW)).startswith("<|im_start|>user\nPlease provide a self-contained Python script")
    assert f"in a markdown code block:\n{block}<|im_end|>\n" in first_prompt(read(ROW))
    assert first_prompt(read(ROW, "dataset.prompt=plain", "model.chat=false")) == ROW["prompt"]


@pytest.mark.parametrize(("field", "value", "message"), [
    ("test", None, "row 0 has None for its test"), ("entry_point", 3, "row 0 has 3 for its entry_point"),
    ("prompt", ["x"], "row 0 has ['x'] for its prompt"), ("task_id", None, "problem None has None for its id"),
    ("canonical_solution", 1, "problem 'HumanEval/0' has 1 for its solution"),
])
def test_a_bad_row_is_an_error_of_one_line(read, field, value, message):
    with refused(start=f"dataset.path: {message}; allowed: a text"):
        read({**ROW, field: value}).dataset.problems()


def test_a_grader_that_compares_answers_is_refused(make_config):
    with refused("grader: given 'math'; allowed: code, with dataset=humaneval"):
        make_config("dataset=humaneval")


def test_all_real_problems(make_config, shared_data):
    dataset = make_config(*UNGRADED, f"dataset.path={shared_data}/humaneval/HumanEval.jsonl").dataset
    problems = dataset.problems()
    assert [problem.id for problem in problems] == [f"HumanEval/{number}" for number in range(164)]
    for problem in problems:
        needed = json.loads(problem.answer)
        assert needed["prompt"] == problem.question
        program = ast.parse(problem.question + problem.solution + "\n" + needed["test"])
        defined = {node.name for node in program.body if isinstance(node, ast.FunctionDef)}
        assert {needed["entry_point"], "check"} <= defined
        assert all(ast.parse(example.check) for example in problem.examples)
    assert sum(any(example.check for example in problem.examples) for problem in problems) == 141
    assert dataset.fingerprint() == "944a2c836ef102f02bbfe97e2985be1c"
