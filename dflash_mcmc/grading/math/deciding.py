"""The verdict on one answer: all of its readings against all of the gold answer's."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mcmc.grading.limits import Unsupported, check_size
from dflash_mcmc.grading.math.answers import Answer
from dflash_mcmc.grading.math.comparing import AnswerComparison
from dflash_mcmc.grading.math.reading import readings
from dflash_mcmc.grading.verdicts import CORRECT, UNSUPPORTED, WRONG, Decision


def decide(gold: str, answer: str) -> Decision:
    """Whether an answer is the gold answer, by which rule.

    Runs in a grading process: it may take long, and raises what the library under it raises.
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
    """The first equality of two readings, else a limit that was met, else the first inequality.

    The comma of `1,234` is not a separator on both sides: what is equal then is so too if it is none.
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
