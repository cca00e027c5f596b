"""What there is to say of a sample."""

from __future__ import annotations

from typing import NamedTuple

CORRECT, WRONG, NO_ANSWER = "correct", "wrong", "no_answer"
UNSUPPORTED, TIMEOUT, ERROR = "unsupported", "timeout", "error"
NOT_DRAWN = "not_drawn"
GIVEN = (CORRECT, WRONG, NO_ANSWER, UNSUPPORTED, TIMEOUT, ERROR)
"""What a grader says. The last three: beyond a limit, out of time, and failed; the answer was not compared to its end."""
VERDICTS = (*GIVEN, NOT_DRAWN)
"""All that a record can have: the last where there is no text to grade."""


class Decision(NamedTuple):
    """What was found of an answer, and the rule that found it."""

    verdict: str
    """One of GIVEN."""
    rule: str
    """The rule that decided; for `unsupported` the limit that was met."""
    reason: str = ""
    """Why, where the rule's name does not tell: the name of an exception, a signal."""
