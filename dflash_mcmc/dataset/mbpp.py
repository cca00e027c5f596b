"""MBPP: 500 short Python programs to write, each with three tests (Austin et al. 2021, arXiv 2108.07732)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dflash_mcmc.dataset.inputs.sources import Benchmark, Hub
from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Problem

_SETUP = ("test_setup_code", "test_imports")
"""Fields with code that runs before a program: the text of the full file, and the list of texts of the sanitized file."""


@register("dataset", "mbpp")
@dataclass(slots=True, kw_only=True)
class Mbpp(Benchmark):
    """MBPP's test split, from the hub (google-research-datasets/mbpp) or a JSON Lines file; for grader=code.

    The question is the task, followed by the tests, as in the paper. The gold answer is JSON with `test_list`, and
    `test_setup_code` or `test_imports` where the row has them. The solution is the published program. The sanitized file
    (257 problems in its test split) has its task in `prompt`, and is read with check_rows=false.
    """

    path: str | None = runtime(None, "JSON Lines file with task_id, text (or prompt), code and test_list; null takes the hub")
    max_new_tokens: int = 512
    prompt: str = "mbpp"
    revision: str | None = "4bb6404fdc6cacfda99d4ac4205087b89d32030c"

    hub = Hub("google-research-datasets/mbpp", "full")
    num_published = 500
    required = ("task_id", "code", "test_list")
    answers_in_text = False

    def problem(self, row: dict, number: int) -> Problem:
        """The problem of a row. Raises UserError if it has no task or no tests."""
        tests, task = row["test_list"], row.get("text", row.get("prompt"))
        if not (isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests)):
            raise UserError(f"dataset.path: row {number} has {tests!r:.80} for its test_list; allowed: a list of texts")
        if not isinstance(task, str):
            raise UserError(f"dataset.path: row {number} has {task!r:.80} for its text or prompt; allowed: a text")
        gold = {"test_list": tests, **{name: row[name] for name in _SETUP if row.get(name)}}
        shown = "\n".join(tests)
        return Problem(f"mbpp-{row['task_id']}", f"{task.strip()} Your code should pass these tests:\n\n{shown}\n",
                       json.dumps(gold), solution=row["code"])
