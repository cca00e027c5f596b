"""The verdict on one answer: compares its readings with the readings of the gold answer."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mcmc.grading.limits import Unsupported, check_size
from dflash_mcmc.grading.math.answers import Answer
from dflash_mcmc.grading.math.comparing import AnswerComparison
from dflash_mcmc.grading.math.reading import readings
from dflash_mcmc.grading.verdicts import CORRECT, UNSUPPORTED, WRONG, Decision


def decide(gold: str, answer: str) -> Decision:
    """Decides whether an answer equals the gold answer.

    Call this function in a grading process only: it may take long, and exceptions of the algebra library are not caught.
    """
    if answer.strip() == gold.strip():
        return Decision(CORRECT, "same")
    try:
        check_size(answer)
        check_size(gold)
        return _of_all(readings(gold), readings(answer))
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))
    except RecursionError:
        return Decision(UNSUPPORTED, "nesting")


def _of_all(golds: Sequence[Answer], answers: Sequence[Answer]) -> Decision:
    """The best decision over pairs of readings. `correct` is better than `unsupported`, which is better than `wrong`.

    An answer with a comma such as `1,234` has two readings: the comma groups digits in the first reading and separates items
    in the second one. The second readings of the two sides are not compared with each other. If they are equal, the first
    readings are equal too.
    """
    decisions = [_of_two(gold, answer) for number, gold in enumerate(golds) for other, answer in enumerate(answers)
                 if not (number and other)]
    return min(decisions, key=lambda decision: (CORRECT, UNSUPPORTED, WRONG).index(decision.verdict))


def _of_two(gold: Answer, answer: Answer) -> Decision:
    comparison = AnswerComparison()
    try:
        equal = comparison.equal(gold, answer)
    except Unsupported as limit:
        return Decision(UNSUPPORTED, str(limit))
    return Decision(CORRECT if equal else WRONG, comparison.rule)
