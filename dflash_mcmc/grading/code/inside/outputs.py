"""Compares outputs with the expected ones, in the process of the tests; `programs.with_tests` appends the call of `examine`.

As in LiveCodeBench's evaluation (Jain et al. 2024): lines without surrounding blanks, lines of numbers by value, and a
returned value with the expected JSON value.
"""

import json
import math
import sys
from decimal import Decimal

_MAX_INT_DIGITS = 50000
"""The largest number of digits of an integer that is read, as in LiveCodeBench's evaluation; Python has 4,300."""
_TOLERANCE = 1e-6
"""The largest error of a real number that is expected, relative to it or, below 1, absolute."""


def examine(run_program, examples, fn_name):
    """Returns the error of the first example that fails, or None if all pass.

    The error is an AssertionError for a wrong output, a NameError if the program does not define the function, or else an
    exception whose class has the name of the program's own exception.
    """
    getattr(sys, "set_int_max_str_digits", lambda digits: None)(_MAX_INT_DIGITS)
    for given, expected in examples:
        kind, output = run_program(given)
        if kind == "missing":
            return NameError("name is not defined", name=fn_name)
        if kind != "done":
            return type(kind, (Exception,), {})()
        alike = bool(output) and _close(json.loads(output), json.loads(expected)) if fn_name else _same_lines(output, expected)
        if not alike:
            return AssertionError()
    return None


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
