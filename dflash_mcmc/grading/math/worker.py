"""The functions that run in a grading process of `grader=math`: the judge and its self-test.

The self-test checks at the start of a process that known pairs are decided correctly with the installed libraries. `golds.txt`
contains the gold answers of MATH-500, one per line (Hendrycks et al. 2021, arXiv 2103.03874, as split by Lightman et al. 2023;
MIT, (c) 2021 Dan Hendrycks, (c) 2023 OpenAI).
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import ERROR, Decision

EQUAL = (
    (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\sqrt{12}", r"2\sqrt{3}"), ("(a+5)(b+2)", "ab+2a+5b+10"), ("3, 5, 7", "7, 5, 3"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"), (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), ("52_8", "52_{8}"),
    (r"x \in [-2,7]", r"-2 \leq x \leq 7"), ("y = 2x + 3", "2x - y + 3 = 0"), (r"\text{east}", "East"),
    (r"\cot x", r"\frac{1}{\tan x}"), (r"\sin 2x", r"2\sin x\cos x"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\frac{1}{5}\begin{pmatrix} 1 \\ -18 \end{pmatrix}"), ("(1+i)^2", "2i"),
)
DIFFERENT = (
    (r"\frac{1}{2}", r"\frac{1}{3}"), ("(0,1)", "[0,1)"), ("17_8", "17_9"), (r"\text{circle}", r"\text{line}"),
    ("3m+n", "3M+N"), ("3^{-80}", "3^{-81}"), (r"\frac{\pi}{3}+1", r"\frac\pi7+1"), (r"\$8", r"8\%"), ("x_1+x_2", "x_1+x_3"),
    (r"\sqrt{x^2}", "x"),
)


def golds() -> list[str]:
    """The 500 gold answers of MATH-500, in the order of the dataset."""
    return Path(__file__).with_name("golds.txt").read_text(encoding="utf-8").splitlines()


def self_test() -> list[str]:
    """The pairs that are decided wrongly. The list is empty if the test passes.

    Each gold answer is compared with itself in braces, so that the strings differ and the answers are parsed. The test also
    triggers all lazy imports of the libraries, before the time of an answer is measured.
    """
    wrong = [f"{gold} = {gold}" for gold in golds() if decide(gold, f"{{ {gold} }}").verdict != "correct"]
    wrong += [f"{gold} = {answer}" for gold, answer in EQUAL if decide(gold, answer).verdict != "correct"]
    return wrong + [f"{gold} != {answer}" for gold, answer in DIFFERENT if decide(gold, answer).verdict != "wrong"]


_PR_SET_PDEATHSIG, _CLONE_NEWUSER, _CLONE_NEWNET = 1, 0x10000000, 0x40000000
OUT_OF_MEMORY = 86
"""Exit code of a worker that ran out of memory."""


def start(memory_gib: float, parent: int) -> None:
    """Restricts this process. Imports the library in advance, so that the time of an answer does not include the import."""
    import math_verify  # noqa: F401

    limit_memory(memory_gib)
    die_with(parent)
    leave_session()
    leave_network()
    logging.disable(logging.CRITICAL)


def serve(pipe: Connection, begin: Callable[[float, int], None], memory_gib: float, parent: int) -> None:
    """The main function of a grading process: begins, says so, and then replies to each call with (result, exception)."""
    begin(memory_gib, parent)
    pipe.send((None, None))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*arguments), None))
        except Exception as error:
            pipe.send((None, error))


def judge(gold: str, answer: str, question: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """(decision, verdict of the string rule). `cpu_seconds` limits the decision; see `within`."""
    return within(cpu_seconds, decide, gold, answer, question), same_string(gold, answer)


def within(cpu_seconds: float, rule: Callable[..., Decision], *arguments: str) -> Decision:
    """The decision of a rule within a limit on processor time.

    Processor time, unlike wall-clock time, does not depend on the load of the machine. The kernel kills the process at the
    limit, even during a long C call. An exception of the library gives the verdict `error`. If the memory is used up, the
    process exits, because the memory that is left might not be enough for the next answer.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return rule(*arguments)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return Decision(ERROR, "exception", type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory(gib: float) -> None:
    """On Linux, limits the address space to `gib` GiB, or to a lower hard limit. macOS refuses that (python/cpython 78783)."""
    if sys.platform == "linux":
        hard, limit = resource.getrlimit(resource.RLIMIT_AS)[1], int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def die_with(parent: int) -> None:
    """On Linux, makes the kernel kill this process when its parent ends for any reason, even during a long C call.

    `parent` is the parent's process id; if it has already ended, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def leave_network() -> bool:
    """On Linux, moves this process to a network namespace without connections. Returns whether the kernel allowed it."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0


def leave_session() -> None:
    """Moves this process to a new session, away from the terminal's signals, and clears its environment.

    The environment may contain access tokens.
    """
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.environ.clear()
