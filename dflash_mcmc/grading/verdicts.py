"""The verdicts on a sample, and what all graders need for them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

_Result = TypeVar("_Result")

CORRECT, WRONG, NO_ANSWER = "correct", "wrong", "no_answer"
UNSUPPORTED, TIMEOUT, ERROR, UNGRADABLE = "unsupported", "timeout", "error", "ungradable"
NOT_DRAWN, TOO_LONG = "not_drawn", "too_long"
GIVEN = (CORRECT, WRONG, NO_ANSWER, UNSUPPORTED, TIMEOUT, ERROR, UNGRADABLE)
"""The verdicts of a grader. The last four mean that the comparison was not completed: the answer exceeded a limit, the time
ran out, the grading failed, or something else killed the grading process MAX_DEATHS times."""
MAX_DEATHS = 3
"""Deaths of grading processes by something else during one answer, after which its verdict is UNGRADABLE."""
UNDRAWN = (NOT_DRAWN, TOO_LONG)
"""The verdicts of records without a text. TOO_LONG: prompt and answer do not fit into the model's positions."""
VERDICTS = (*GIVEN, *UNDRAWN)
"""All verdicts of records."""


class Decision(NamedTuple):
    """The verdict on an answer and the rule that led to it."""

    verdict: str
    """One of GIVEN."""
    rule: str
    """The rule that decided; for `unsupported`, the limit that was exceeded."""
    reason: str = ""
    """Further detail that the rule's name does not give: the name of an exception or of a signal."""


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def timed(function: Callable[..., _Result], *arguments: object) -> tuple[_Result, float]:
    """(the result of a function, its seconds on the wall clock)."""
    started = time.perf_counter()
    return function(*arguments), time.perf_counter() - started
