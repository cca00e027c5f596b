"""MBPP: 500 short Python programs to write, each with three tests (Austin et al. 2021, arXiv 2108.07732)."""

import json
from dataclasses import dataclass
from typing import Literal

from dflash_mcmc.components import identity, register, runtime
from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import examples_in, function_of
from dflash_mcmc.types import Problem

_SETUP = ("test_setup_code", "test_imports")
"""Fields with code that runs before a program: the text of the full file, and the list of texts of the sanitized file."""
_NUM_ROWS, _TEST_IDS = 974, range(11, 511)
"""Rows of the full file with all splits, and the ids of its test split."""


@register("dataset", "mbpp")
@dataclass(slots=True, kw_only=True)
class Mbpp(Benchmark):
    """MBPP's test split, from the hub (google-research-datasets/mbpp) or a JSON Lines file; for grader=code.

    The question is the task, followed by the tests, as in the paper. With `shown=first` it has the first test alone, which
    is then an example, and the others decide; rows 37, 337 and 508 repeat it among the others. The gold answer is JSON with
    `test_list`, the tests that decide, and `test_setup_code` or `test_imports` where the row has them. The solution is the
    published program. Of the full file with all splits, the rows of the test split are read: ids 11 to 510. The sanitized
    file (257 problems in its test split) has its task in `prompt`, and is read with check_rows=false.
    """

    path: str | None = runtime(None, "JSON Lines file with task_id, text (or prompt), code and test_list; null takes the hub")
    shown: Literal["all", "first"] = identity("all", "tests in the question: all, as in the paper; first = the first, and the "
                                              "others decide", later=True)
    max_new_tokens: int = 512
    prompt: str = "mbpp"
    revision: str | None = "4bb6404fdc6cacfda99d4ac4205087b89d32030c"

    hub = Hub("google-research-datasets/mbpp", "full")
    num_published = 500
    required = ("task_id", "code", "test_list")
    answers_in_text = False

    def rows(self) -> list[dict]:
        rows = super().rows()
        return [row for row in rows if row["task_id"] in _TEST_IDS] if len(rows) == _NUM_ROWS else rows

    def problem(self, row: dict, number: int) -> Problem:
        tests, task = row["test_list"], row.get("text", row.get("prompt"))
        if not (isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests)):
            raise UserError(f"dataset.path: row {number} has {tests!r:.80} for its test_list; allowed: a list of texts")
        if not isinstance(task, str):
            raise UserError(f"dataset.path: row {number} has {task!r:.80} for its text or prompt; allowed: a text")
        try:
            function = function_of(tests[0])
        except (SyntaxError, ValueError, LookupError) as error:
            raise UserError(f"dataset.path: row {number} has {tests[0]!r:.80} for a test; allowed: an assertion that calls a "
                            "function") from error
        shown, hidden = (tests, tests) if self.shown == "all" else (tests[:1], tests[1:])
        if not hidden:
            raise UserError(f"dataset.shown: row {number} has one test, which shown=first would show; allowed: all")
        gold = {"test_list": hidden, **{name: row[name] for name in _SETUP if row.get(name)}}
        named = "these tests" if self.shown == "all" else "this test"
        question = f"{task.strip()} Your code should pass {named}:\n\n" + "\n".join(shown) + "\n"
        return Problem(f"mbpp-{row['task_id']}", question, json.dumps(gold), solution=row["code"],
                       examples=examples_in(question, function))
