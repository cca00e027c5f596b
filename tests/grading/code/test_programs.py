"""The program in a text: a fenced block of a chat model, or the completion of a base model."""

import time

import pytest

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.code.programs import CodeTask, program_of, task_of, with_tests
from tests.grading.golds import gold_of

TASK = CodeTask('from typing import List\n\n\ndef f(x: List[int]) -> int:\n    """Doc."""\n',
            "def check(c):\n    assert c([]) == 0\n", "f")
HEAD = "from typing import List\n\n\n"
WHOLE = "def f(x):\n    return 0\n"


@pytest.mark.parametrize(("text", "program"), [
    ("    return 0\n", TASK.prompt + "    return 0\n"),
    ("return 0", TASK.prompt + "    return 0"),
    ("   y = 1\n    return 0\n", TASK.prompt + "    y = 1\n    return 0\n"),
    ("    return 0\n\ndef g():\n    pass\n", TASK.prompt + "    return 0\n"),
    ("    return 0\n\n# Test\nprint(1)", TASK.prompt + "    return 0\n"),
    ("    return 0\nif __name__ == '__main__':\n    f([])", TASK.prompt + "    return 0"),
    ("    return 0\n```\nThis works.", TASK.prompt + "    return 0"),
    ("```python\n    return 0\n```", TASK.prompt + "    return 0"),
    ("    # zero\n    return 0", TASK.prompt + "    # zero\n    return 0"),
    (f"Here:\n```python\n{WHOLE}```\nDone.", HEAD + WHOLE),
    (f"```\n{WHOLE}```", HEAD + WHOLE),
    (f"```python\n{WHOLE}", HEAD + WHOLE),
    (f"```python\ndef f(x):\n    return 1\n```\nBetter:\n```python\n{WHOLE}```", HEAD + WHOLE),
    (f"```python\n{WHOLE}```\nUsage:\n```python\nprint(f([]))\n```", HEAD + WHOLE),
    (WHOLE, HEAD + WHOLE),
    ("Here is the code:\n\n" + WHOLE, HEAD + WHOLE),
    ("    return 0\n\n\n" + TASK.prompt + "    return 1\n", TASK.prompt + "    return 0\n\n\nfrom typing import List\n\n"),
    (f"```python\nfrom __future__ import annotations\n{WHOLE}```", "from __future__ import annotations\n" + HEAD + WHOLE),
    (f"<think>def f(x): hm</think>\n```python\n{WHOLE}```", HEAD + WHOLE),
    ("<think>unfinished", None), ("", None), (" \n", None),
])
def test_program_of(text, program):
    assert program_of(text, TASK) == program


LISTED = "    def f(x):\n        return 0\n"


@pytest.mark.parametrize("text", [
    f"Text\n~~~python title=\"a `b` ~ c\"\n{WHOLE}~~~\nDone.", f"~~~{{.python .numberLines}}\n{WHOLE}~~~",
    f"1. X\n    ~~~python title=x\n{LISTED}    ~~~\n", f"10. Solution:\n\n    ```python\n{LISTED}    ```\n11. Notes",
    f"- a\n  - b\n\n    ```python\n{LISTED}    ```\n", f"- ```python\n{LISTED}  ```\n", f"1) ~~~python\n{LISTED}   ~~~\nDone",
    f"*\t```python\n{LISTED}    ```\n", "> ```python\n> def f(x):\n>     return 0\n> ```\n",
    f"1. X\n   ```python\n{WHOLE}   ```\nDone", f"```{{.python}}\n{WHOLE}```", f"```python\n{WHOLE}``` is the program."],
    ids=range(12))
@pytest.mark.parametrize("task", [TASK, CodeTask("", "", "f")], ids=["completion", "whole"])
def test_fences_of_tildes_and_in_lists(text, task):
    names: dict = {}
    exec(program_of(text, task), names)
    assert names["f"](1) == 0


SENTENCES = "Here is the solution:\n\n{}\nThis adds two numbers."


@pytest.mark.parametrize("text", [
    f"{WHOLE}```", f"import math\n\n{WHOLE}```", f"{WHOLE}```\nThis works.", SENTENCES.format(WHOLE),
    "1. Code:\n   ```python\n   def f(x):\n       return 0\n   ```",
    f"Let me think.\n\n```python\n{WHOLE}", f"```\n{WHOLE}```",
    f"{WHOLE}\nThis returns zero always."], ids=range(8))
def test_programs_of_mbpp_without_an_opening_fence(text):
    names: dict = {}
    exec(program_of(text, CodeTask("", "", "f")), names)
    assert names["f"](1) == 0


@pytest.mark.parametrize("text", [
    "```" + " " * 1_000_000 + "x", " " * 1_000_000 + "x", "```python\n    return 0\n```" + "\t" * 1_000_000 + "x",
    ("```" + " " * 500) * 2_000, (" " * 500 + "\n") * 2_000, "```python\n" + " " * 1_000_000 + "x"], ids=range(6))
def test_a_megabyte_of_blanks_is_read_in_seconds(text):
    """The run itself reads it. It takes a tenth of a second; with quadratic time it would take hours."""
    started = time.process_time()
    program_of(text, TASK)
    assert time.process_time() - started < 5


def test_tests_follow_the_program():
    task = task_of(gold_of(TASK))
    assert with_tests(WHOLE, task) == (WHOLE, f"{HEAD}\n{TASK.test}\ncheck(f)")
    assert task._replace(test=TASK.test) == TASK


@pytest.mark.parametrize("gold", ["42", "", "[]", '{"test_list": []}', '{"test_list": ["assert 1 =="]}',
                                  '{"test_list": ["assert [].count(1) == 0"]}', '{"inputs": ["1"], "outputs": []}',
                                  '{"inputs": [], "outputs": []}', '{"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}',
                                  '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f()"}', '{"private_test_cases": "gASV"}',
                                  f'{{"inputs": ["{"1" * (1 << 20)}"], "outputs": ["1"]}}',
                                  '{"prompt": "x"}', '{"prompt": 1, "test": "", "entry_point": "f"}',
                                  '{"prompt": "", "test": "", "entry_point": "f(); import os"}'],
                         ids=range(15))
def test_other_gold_answers_are_rejected(gold):
    with pytest.raises(UserError, match="allowed: JSON with the texts prompt, test, entry_point"):
        task_of(gold)
