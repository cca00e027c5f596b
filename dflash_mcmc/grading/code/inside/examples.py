"""Runs a program on inputs, in its process of the sandbox; `programs.with_tests` appends the call of `prepared`.

Each input has a child process of its own.
"""

import json
import os
import sys

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


def prepared(source, fn_name):
    """A function that runs the program on an input and returns (kind, output). Raises SyntaxError for no program.

    The kind is `done`, `missing`, or the name of an exception.
    """
    getattr(sys, "set_int_max_str_digits", lambda digits: None)(_MAX_INT_DIGITS)
    code = compile(source, "program", "exec")
    names = {"__name__": "__main__"}
    exec(_PRELUDE, names)
    return lambda given: _result(code, names, given, fn_name)


def _result(code, names, given, fn_name):
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
            solution = names["Solution"]() if "Solution" in names else None
            function = getattr(solution, fn_name, None) or names.get(fn_name)
            if function is None:
                raise _Missing
            write(output, json.dumps(function(*(json.loads(line) for line in given.split("\n") if line.strip()))).encode())
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
