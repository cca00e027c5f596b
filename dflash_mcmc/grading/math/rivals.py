"""Other graders, for the comparison by `python -m dflash_mcmc.grading` only; no run uses them.

They run in grading processes like `grader=math` and have the signature of `worker.judge`.
"""

from __future__ import annotations

from functools import partial

from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.math.worker import judge, within
from dflash_mcmc.grading.verdicts import CORRECT, WRONG, Decision


def exact_string(gold: str, answer: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """Accepts an answer only if it is the same string as the gold answer."""
    return _decision(gold == answer, "exact"), same_string(gold, answer)


def string_rule(gold: str, answer: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """The string rule: PRM800K's normalisation without its algebra."""
    same = same_string(gold, answer)
    return _decision(same, "string"), same


def math_verify_bare(gold: str, answer: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """math-verify as its documentation shows it, on the unchanged answers."""
    return within(cpu_seconds, partial(_math_verify, mark=""), gold, answer), same_string(gold, answer)


def math_verify_dollars(gold: str, answer: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """math-verify with `$` around both answers, so that it reads them as LaTeX."""
    return within(cpu_seconds, partial(_math_verify, mark="$"), gold, answer), same_string(gold, answer)


def _math_verify(gold: str, answer: str, mark: str) -> Decision:
    from math_verify import parse, verify

    sides = [parse(f"{mark}{side}{mark}", parsing_timeout=None) for side in (gold, answer)]
    return _decision(verify(*sides, timeout_seconds=None), "math-verify")


def _decision(equal: bool, rule: str) -> Decision:
    return Decision(CORRECT if equal else WRONG, rule)


RIVALS = {
    "exact string": exact_string, "string rule (PRM800K's strings)": string_rule, "math-verify, bare": math_verify_bare,
    "math-verify, $...$": math_verify_dollars, "grader=math": judge,
}
