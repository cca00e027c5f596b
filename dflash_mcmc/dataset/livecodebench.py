"""LiveCodeBench: problems of programming contests with tests (Jain et al. 2024, arXiv 2403.07974), from its files.

A pickle is a program. This module reads texts from pickles without unpickling and executes none.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from dataclasses import dataclass
from typing import Any

from dflash_mcmc.dataset.inputs.sources import FromFile
from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import runtime
from dflash_mcmc.registry import register
from dflash_mcmc.store.schema import loaded
from dflash_mcmc.types import Problem

_WITH_STARTER = ("You will use the following starter code to write the solution to the problem and enclose your code within "
                 "delimiters.")
_WITHOUT_STARTER = ("Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the "
                    "sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program "
                    "runs, it reads the inputs, runs the algorithm and writes output to STDOUT.")
_TO_WRITE = "# YOUR CODE HERE"


@register("dataset", "livecodebench")
@dataclass(slots=True, kw_only=True)
class LiveCodeBench(FromFile):
    """LiveCodeBench's code generation from a file of livecodebench/code_generation_lite; for grader=code.

    The question has the problem and the format of the answer, in the wording of lcb_runner. The gold answer is JSON. Its
    `inputs` and `outputs` are lists of texts. Its `fn_name` is the name of the method of `class Solution`, or null for a
    program that reads stdin. The file's private tests are a pickled text.
    """

    path: str | None = runtime(None, "test.jsonl, test2.jsonl, ... of livecodebench/code_generation_lite; needed, because the "
                               "hub's loader is a program, which is not run here")
    private_tests: bool = runtime(False, "whether the private tests are used as well, as for published scores; their content "
                                  "is part of the identity, and each record holds its tests, which can be megabytes")
    max_new_tokens: int = 4096
    prompt: str = "program"

    required = ("question_id", "question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
    answers_in_text = False

    def problem(self, row: dict, number: int) -> Problem:
        where = f"row {number}"
        tests = _tests(row["public_test_cases"], f"{where} for its public_test_cases")
        if self.private_tests:
            tests += _tests(_private(row["private_test_cases"], where), f"{where} for its private_test_cases")
        name = _parsed(row["metadata"], dict, f"{where} for its metadata").get("func_name")
        gold = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests], "fn_name": name}
        content, starter = row["question_content"], row["starter_code"]
        if not isinstance(content, str) or not isinstance(starter, str):
            raise UserError(f"dataset.path: {where} has {content!r:.40} and {starter!r:.40}; allowed: texts for "
                            "question_content and starter_code")
        form, code = (_WITH_STARTER, starter) if starter else (_WITHOUT_STARTER, _TO_WRITE)
        return Problem(row["question_id"],
                       f"### Question:\n{content}\n\n### Format: {form}\n```python\n{code}\n```\n\n### Answer: (use the "
                       "provided format with backticks)\n\n", json.dumps(gold), subject=row.get("difficulty"))


def _private(value: object, where: str) -> object:
    if not isinstance(value, str) or value.lstrip().startswith("["):
        return value
    try:
        return text_of_base64(value)
    except ValueError as error:
        raise UserError(f"dataset.path: {where} has private_test_cases that cannot be read: {error}; allowed: JSON, or a text "
                        "that is pickled, compressed by zlib and written in base 64") from error


def _tests(value: object, where: str) -> list[dict[str, str]]:
    tests = _parsed(value, list, where)
    if not all(isinstance(test, dict) and isinstance(test.get(name), str) for test in tests for name in ("input", "output")):
        raise UserError(f"dataset.path: {where}: given {value!r:.80}; allowed: JSON with a list of input and output, both "
                        "texts")
    return tests


def _parsed(value: object, kind: type, where: str) -> Any:
    try:
        content = loaded(value) if isinstance(value, str) else value
    except ValueError:
        content = None
    if not isinstance(content, kind):
        raise UserError(f"dataset.path: {where}: given {value!r:.80}; allowed: JSON of a {kind.__name__}")
    return content


_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_WITHOUT_EFFECT = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
_LARGEST = 1 << 30
"""Largest pickle in bytes: a small compressed file can expand to any size."""


def text_of(pickle: bytes) -> str:
    """The text of a pickle that holds a single text. Raises ValueError for any other pickle.

    The instructions are listed by `pickletools` and not executed. Only those that push a text or have no effect are accepted.
    """
    instructions = [(instruction.name, argument) for instruction, argument, _ in pickletools.genops(pickle)]
    texts = [argument for name, argument in instructions if name in _TEXTS]
    other = next((name for name, _ in instructions if name not in (*_TEXTS, *_WITHOUT_EFFECT)), None)
    if other is not None or len(texts) != 1:
        raise ValueError(f"a pickle with {other or f'{len(texts)} texts'} instead of a single text")
    return str(texts[0])


def text_of_base64(packed: str) -> str:
    """The text of a pickle that is compressed by zlib and written in base 64. Raises ValueError."""
    try:
        opened = zlib.decompressobj()
        content = opened.decompress(base64.b64decode(packed, validate=True), _LARGEST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not opened.eof:
        raise ValueError("it is cut off, or larger than 1 GiB")
    return text_of(content)
