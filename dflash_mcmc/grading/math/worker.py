"""What runs in a grading process of `grader=math`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable

from dflash_mcmc.grading.math.deciding import decide
from dflash_mcmc.grading.math.self_test import self_test
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import ERROR, Decision
from dflash_mcmc.grading.walls import die_with, leave_network, leave_session, limit_memory

OUT_OF_MEMORY = 86
"""Exit code of a worker that an answer took all memory of."""


def start(memory_gib: float, parent: int) -> None:
    """Limits this process and loads the library before any answer's time runs."""
    import math_verify  # noqa: F401

    limit_memory(memory_gib)
    die_with(parent)
    leave_session()
    leave_network()
    logging.disable(logging.CRITICAL)


def check() -> list[str]:
    """What the self-test finds wrong."""
    return self_test()


def judge(gold: str, answer: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """(decision, what the string rule says).

    The time is the processor's, so that a busy machine changes no verdict; the kernel ends the process when it is used up,
    also in the midst of a long C call. What the library raises on an answer is that answer's fault. An answer that takes all
    memory takes the process with it, since what is left of it could fail the next one.
    """
    return within(cpu_seconds, decide, gold, answer), same_string(gold, answer)


def within(cpu_seconds: float, rule: Callable[[str, str], Decision], gold: str, answer: str) -> Decision:
    """What a rule decides in so much of the processor's time; see `judge`."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return rule(gold, answer)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return Decision(ERROR, "exception", type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
