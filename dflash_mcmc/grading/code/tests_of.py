"""The tests of a code problem: reads the gold answers that `grading.code.programs` describes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import function_of

_FIELDS = ("prompt", "test", "entry_point")
_MAX_EXAMPLE = 1 << 20
"""The largest number of bytes in an input or an output: the sandbox limits the size of files to this."""
_ALLOWED = ("JSON with the texts prompt, test, entry_point as dataset=humaneval has, with test_list as MBPP has, or with "
            "inputs and outputs or public_test_cases as LiveCodeBench has")


class Examples(NamedTuple):
    """Inputs and expected outputs. With a function name, each line of an input is a JSON value, an argument of the
    function."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fn_name: str | None


class CodeTask(NamedTuple):
    """A code problem with its tests. An empty prompt means that the text has the whole program.

    `test` is the script of the tests. `entry_point` is the function that is tested, empty where a program uses stdin. With
    `examples`, the program is run on them, and `test` is not used.
    """

    prompt: str
    test: str
    entry_point: str
    examples: Examples | None = None


def task_of(gold: str) -> CodeTask:
    """Parses a gold answer. Raises UserError if it has no tests of a known kind."""
    try:
        fields = json.loads(gold)
        return _task(fields)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SyntaxError) as error:
        raise UserError(f"grader=code: given the gold answer {gold[:60]!r}; allowed: {_ALLOWED}") from error


def _task(fields: Mapping[str, Any]) -> CodeTask:
    if "test_list" in fields:
        return _mbpp(fields)
    if "inputs" in fields:
        return _with_examples(fields["inputs"], fields["outputs"], fields.get("fn_name"))
    if "public_test_cases" in fields:
        return _livecodebench(fields)
    prompt, test, entry_point = (_text(fields[name]) for name in _FIELDS)
    return CodeTask(prompt, f"{test}\ncheck({_identifier(entry_point)})", entry_point)


def _mbpp(fields: Mapping[str, Any]) -> CodeTask:
    tests = [_text(test) for test in fields["test_list"]]
    setup = "\n".join([*map(_text, fields.get("test_imports") or ()), _text(fields.get("test_setup_code") or "")]).strip()
    entry_point = _identifier(function_of(tests[0]))
    script = "\n".join([setup, *tests])
    compile(script, "tests", "exec", flags=ast.PyCF_ONLY_AST)
    return CodeTask("", script, entry_point)


def _livecodebench(fields: Mapping[str, Any]) -> CodeTask:
    cases, metadata = (_parsed(fields.get(name)) for name in ("public_test_cases", "metadata"))
    inputs, outputs = ([case[name] for case in cases] for name in ("input", "output"))
    return _with_examples(inputs, outputs, (metadata or {}).get("func_name"))


def _with_examples(inputs: Any, outputs: Any, fn_name: Any) -> CodeTask:
    examples = Examples(tuple(map(_text, inputs)), tuple(map(_text, outputs)), fn_name and _identifier(_text(fn_name)))
    if not inputs or len(inputs) != len(outputs) or isinstance(inputs, str) or isinstance(outputs, str):
        raise ValueError("an input without an output")
    if max(len(text.encode("utf-8", "surrogatepass")) for text in (*examples.inputs, *examples.outputs)) >= _MAX_EXAMPLE:
        raise ValueError("an example of more than 1 MiB")
    if examples.fn_name:
        for text in (*examples.outputs, *(line for given in examples.inputs for line in given.split("\n") if line.strip())):
            json.loads(text)
    return CodeTask("", "", examples.fn_name or "", examples)


def _parsed(value: Any) -> Any:
    """A value that official files store as JSON text, parsed. Other values are unchanged. Nothing is unpickled."""
    return json.loads(value) if isinstance(value, str) and value else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("not a name")
    return name
