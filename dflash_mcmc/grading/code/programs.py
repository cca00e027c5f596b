"""Programs of code problems: the gold answer as tests, and a model's text as the program that they are run on.

The gold answer of a problem for `grader=code` is a JSON object in `Problem.answer`:

    {"prompt": "...", "test": "...", "entry_point": "..."}

`prompt` is what a completion goes on from (imports, signature, docstring), `test` defines `check(candidate)`, and
`entry_point` names the function that is handed to it: the fields of HumanEval (Chen et al. 2021, arXiv 2107.03374).
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import behind_thinking

_OPENING = r"```[ \t]*(?:[\w+-]+[ \t]*)?\n"
_FENCE = re.compile(rf"^[ \t]*{_OPENING}(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_OPENED = re.compile(rf"\s*{_OPENING}")
_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n```")
"""Where a completion of HumanEval ends: the stop sequences of Chen et al. 2021, section 2.1, and the end of a block."""
_INDENT = "    "
_FIELDS = ("prompt", "test", "entry_point")


class Task(NamedTuple):
    """What a program is tested with."""

    prompt: str
    test: str
    entry_point: str


def task_of(gold: str) -> Task:
    """The task of a gold answer. Raises UserError for one that is none."""
    try:
        fields = json.loads(gold)
        values = [fields[name] for name in _FIELDS]
    except (ValueError, LookupError, TypeError):
        values = [None]
    if not all(isinstance(value, str) for value in values) or not values[-1].isidentifier():
        raise UserError(f"grader=code: given the gold answer {gold[:60]!r}; allowed: JSON with the texts {', '.join(_FIELDS)} "
                        "as dataset=humaneval has")
    return Task(*values)


def gold_of(task: Task) -> str:
    """The gold answer of a task: what a dataset puts into `Problem.answer`."""
    return json.dumps(task._asdict(), ensure_ascii=False)


def program_of(text: str, task: Task) -> str | None:
    """The program that a text stands for; None where it holds none.

    That is the last fenced block that defines the entry point, or a text without fences that does, behind the imports of the
    prompt; else the text as what the prompt goes on with, up to where a completion ends.
    """
    answer = behind_thinking(text)
    if answer is None or not answer.strip():
        return None
    defines = re.compile(rf"^(?:async\s+)?def\s+{re.escape(task.entry_point)}\b", re.MULTILINE)
    whole = [block for block in _FENCE.findall(answer) if defines.search(block)]
    if not whole and "```" not in answer and defines.search(answer):
        whole = [answer]
    if whole:
        return _preamble(task, defines) + whole[-1]
    return task.prompt + _completion(_OPENED.sub("", answer, count=1) if _OPENED.match(answer) else answer)


def with_tests(program: str, task: Task) -> str:
    """The program with its tests behind it, as HumanEval runs them."""
    return f"{program}\n{task.test}\ncheck({task.entry_point})"


def _preamble(task: Task, defines: re.Pattern) -> str:
    """What the prompt has before the entry point: imports and helper functions."""
    found = defines.search(task.prompt)
    return task.prompt[:found.start()] if found else ""


def _completion(text: str) -> str:
    """The text up to the first stop sequence that something stands before; its first line as far to the right as a body is.

    Decoding and stripping take spaces off the first line alone, which no program can mean.
    """
    ends = [place for stop in _STOPS if (place := text.find(stop)) > 0]
    body = text[:min(ends)] if ends else text
    missing = len(_INDENT) - (len(body) - len(body.lstrip(" ")))
    return body if body[:1] in ("\n", "\r", "\t", "#") or missing <= 0 else " " * missing + body
