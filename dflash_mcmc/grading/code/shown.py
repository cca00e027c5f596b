"""What a program does on the examples that its question shows: the share that it passes, and what it returns.

The examples run as tests do, in a process that the program cannot read: what a program prints or raises is no verdict. What a
program returns is the hash that its run raises. A program can lie about that, and then votes for its lie.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_mcmc.types import Example

if TYPE_CHECKING:
    from dflash_mcmc.grading.code.sandbox import Ended

_MOST_CALLS = 24
_RETURNED = "returned_"
_HARNESS = """
def _texts(calls):
    def text(value):
        return f"{type(value).__name__}{sorted(map(repr, value))}" if isinstance(value, (set, frozenset)) else repr(value)
    for call in calls:
        try:
            yield text(eval(call, dict(globals())))
        except Exception as error:
            yield "!" + type(error).__name__
import hashlib as _hashlib
_returned = list(_texts({calls!r}))
if not all(_text.startswith("!") for _text in _returned):
    raise type("{name}" + _hashlib.sha256(repr(_returned).encode("utf-8", "replace")).hexdigest()[:32], (BaseException,), {{}})
"""


def share_passed(run: Callable[..., Ended], program: str, examples: Sequence[Example]) -> float | None:
    """The share of the examples that a program passes; None if no example has a known result.

    Args:
        run: runs a program, and tests of it, in the sandbox.
    """
    checks = [example.check for example in examples if example.check]
    if not checks:
        return None
    if run(program, tests="\n".join(checks)).passed:
        return 1.0
    return sum(run(program, tests=check).passed for check in checks) / len(checks) if len(checks) > 1 else 0.0


def behaviour(run: Callable[[str], Ended], program: str, examples: Sequence[Example]) -> str | None:
    """A hash of what a program returns on `calls_of`; None if it does not end, or raises on every call."""
    calls = calls_of(examples)
    if not calls:
        return None
    harness = _HARNESS.replace("{calls!r}", repr(calls)).replace("{name}", _RETURNED).replace("{{}}", "{}")
    name = run(f"{program}\n{harness}").detail
    return name.removeprefix(_RETURNED) if name.startswith(_RETURNED) else None


def calls_of(examples: Sequence[Example]) -> list[str]:
    """The calls of the examples, and the same with one argument changed: at most 24."""
    calls = [example.call for example in examples if example.call]
    return list(dict.fromkeys([*calls, *(changed for call in calls for changed in _changed(call))]))[:_MOST_CALLS]


def _changed(call: str) -> Iterator[str]:
    parsed = ast.parse(call, mode="eval").body
    for place, argument in enumerate(parsed.args):  # type: ignore[attr-defined]  # `Example.call` is a call
        for value in _values(ast.literal_eval(argument)):
            parsed.args[place] = ast.parse(repr(value), mode="eval").body  # type: ignore[attr-defined]
            yield ast.unparse(parsed)
        parsed.args[place] = argument  # type: ignore[attr-defined]


def _values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value - 1, -value)
    elif isinstance(value, (str, list, tuple)):
        yield from (value[:0], value[::-1], value + value, value[:-1])
