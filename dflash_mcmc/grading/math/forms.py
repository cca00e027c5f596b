"""Forms that a question asks for: an equal answer that only restates the question, or has another form, is not right."""

from __future__ import annotations

import math
import re

from dflash_mcmc.grading.math.algebra import CALLS
from dflash_mcmc.grading.math.latex import is_number, tokenise
from dflash_mcmc.grading.math.units import measured

_COMPUTE = re.compile(r"(?i)\b(?:compute|evaluate|simplify|calculate|find|determine|reduce|express|write|convert|what is)\b")
_FRACTION = re.compile(r"(?i)lowest terms|(?:common|simplified|reduced|improper) fraction|as a fraction|simplest form")
_DECIMAL = re.compile(r"(?i)as a (?:\w+ )?decimal|decimal (?:form|answer|number)|nearest (?:tenth|hundredth|thousandth)")
_INTEGERS = re.compile(r"(?:- )?(?:(\d+)|\\frac \{ -? ?(\d+) \} \{ (\d+) \}|(\d+) / (\d+))")


def has_asked_form(gold: str, answer: str, question: str) -> bool:
    """Whether an answer that equals the gold answer has the form that the question asks for.

    A question that asks for a fraction in lowest terms gets one, and no decimal; one that asks for a decimal gets no fraction.
    An answer is refused too if it is an expression of the question that is not worked out, or still has a function of it, such
    as `\\sin`, where the gold answer is a number without functions.
    """
    golds, answers, asked = tokenise(gold), tokenise(answer), tokenise(question)
    wanted, given = (_INTEGERS.fullmatch(" ".join(measured(side).tokens)) for side in (golds, answers))
    if wanted and not wanted[1] and _FRACTION.search(question) and r"\frac" in "".join(golds):
        return _is_reduced(given)
    if not wanted and _DECIMAL.search(question) and len(measured(golds).tokens) == 1:
        return given is None or given[1] is not None
    if golds == answers or not _COMPUTE.search(question) or (given and _is_reduced(given)):
        return True
    functions = {token for token in answers if token in CALLS and token in asked} - set(golds)
    if functions and not any(token.isalpha() for token in golds):
        return False
    worked_out = all(is_number(token) or token in "-.,;()[]" or token[0] == '"' for token in answers) or len(answers) < 3
    return worked_out or " ".join(answers) not in " ".join(asked)


def _is_reduced(fraction: re.Match | None) -> bool:
    parts = [int(part) for part in fraction.groups() if part] if fraction else []
    return len(parts) == 1 or (len(parts) == 2 and math.gcd(*parts) == 1)
