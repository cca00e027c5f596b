"""Runs a program on examples, in the interpreter of the sandbox; `programs.with_tests` appends the call of `examine`.

Each example runs in a child process, which does not hold the descriptor of the verdict. The parent process compares the output
with the expected output, as in LiveCodeBench's evaluation (Jain et al. 2024): lines without surrounding blanks, lines of
numbers by value, and a returned value with the expected JSON value.
"""

import json
import math
import os
import sys
from decimal import Decimal

_PRELUDE = "\n".join([
    "from string import *", "from re import *", "from datetime import *", "from collections import *", "from heapq import *",
    "from bisect import *", "from copy import *", "from math import *", "from random import *", "from statistics import *",
    "from itertools import *", "from functools import *", "from operator import *", "from io import *", "from sys import *",
    "from json import *", "from builtins import *", "from typing import *",
    *(f"import {name}" for name in ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
                                    "statistics", "itertools", "functools", "operator", "io", "sys", "json")),
    "sys.setrecursionlimit(50000)"])
"""What LiveCodeBench's evaluation puts before a program: starter code uses `List` without an import."""
_SIGNALLED = 128
_MAX_INT_DIGITS = 50000
"""The largest number of digits of an integer that is read or written, as in LiveCodeBench's evaluation; Python has 4,300."""
_TOLERANCE = 1e-6
"""The largest error of a real number that is expected, relative to it or, below 1, absolute."""


def examine(source, examples, fn_name):
    """Returns the error of the first example that fails, or None if all pass.

    The error is an AssertionError for a wrong output, a NameError if the program does not define the function, or else an
    exception whose class has the name of the program's own exception.
    """
    getattr(sys, "set_int_max_str_digits", lambda digits: None)(_MAX_INT_DIGITS)
    code = compile(source, "program", "exec")
    names = {"__name__": "__main__"}
    exec(_PRELUDE, names)
    for given, expected in examples:
        kind, output = _result(code, names, given, fn_name)
        if kind == "missing":
            return NameError("name is not defined", name=fn_name)
        if kind != "done":
            return type(kind, (Exception,), {})()
        alike = bool(output) and _close(json.loads(output), json.loads(expected)) if fn_name else _same_lines(output, expected)
        if not alike:
            return AssertionError()
    return None


def _result(code, names, given, fn_name):
    """(kind, output) of one example. The kind is `done`, `missing`, or the name of an exception."""
    report, output = os.memfd_create("report"), os.memfd_create("output")
    process = os.fork()
    if process == 0:
        _run(code, names, given, fn_name, report, output)
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        os._exit(_SIGNALLED + os.WTERMSIG(status))
    kind, printed = [os.pread(descriptor, 1 << 21, 0).decode("utf-8", "replace") for descriptor in (report, output)]
    os.close(report)
    os.close(output)
    return kind or "done", printed


def _run(code, names, given, fn_name, report, output):
    """Runs the program in this child process, then ends the process."""
    os.close(int(sys.argv[1]))
    source = os.memfd_create("input")
    os.write(source, b"" if fn_name else given.encode("utf-8", "surrogatepass"))
    os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if fn_name else output, 1)
    sys.stdin, sys.stdout = os.fdopen(0, encoding="utf-8", closefd=False), os.fdopen(1, "w", encoding="utf-8", closefd=False)
    write, leave = os.write, os._exit
    try:
        names.update(stdin=sys.stdin, stdout=sys.stdout)
        exec(code, names)
        if fn_name:
            write(output, json.dumps(_call(names, given, fn_name)).encode())
        elif "threading" in sys.modules:
            for thread in sys.modules["threading"].enumerate():
                if thread is not sys.modules["threading"].current_thread():
                    thread.join()
    except SystemExit:  # a program may end itself
        pass
    except BaseException as error:
        write(report, ("missing" if isinstance(error, _Missing) else type(error).__name__[:60]).encode("utf-8", "replace"))
    try:
        sys.stdout.flush()
    finally:
        leave(0)


class _Missing(Exception):
    """The program does not define the function."""


def _call(names, given, fn_name):
    solution = names["Solution"]() if "Solution" in names else None
    function = getattr(solution, fn_name, None) or names.get(fn_name)
    if function is None:
        raise _Missing
    return function(*(json.loads(line) for line in given.split("\n") if line.strip()))


def _close(output, expected):
    """Whether two JSON values are equal, up to the tolerance where a real number is expected."""
    if isinstance(expected, list):
        return isinstance(output, list) and len(output) == len(expected) and all(map(_close, output, expected))
    if isinstance(expected, dict):
        return isinstance(output, dict) and output.keys() == expected.keys() and all(
            _close(output[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(output, (int, float)):
        return output == expected or math.isclose(output, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return output == expected


def _same_lines(output, expected):
    printed, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    return len(printed) == len(wanted) and all(one == other or _same_numbers(one, other)
                                               for one, other in zip(printed, wanted, strict=True))


def _same_numbers(one, other):
    """Whether two lines are the same numbers. A number with a decimal point or an exponent has a tolerance."""
    words = one.split(), other.split()
    try:
        return len(words[0]) == len(words[1]) and all(
            Decimal(printed) == Decimal(wanted) or ({*".eE"} & {*wanted} and abs(Decimal(printed) - Decimal(wanted))
                                                    <= Decimal(_TOLERANCE) * max(Decimal(1), abs(Decimal(wanted))))
            for printed, wanted in zip(*words, strict=True))
    except ArithmeticError:
        return False
