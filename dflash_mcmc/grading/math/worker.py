"""The functions that run in a grading process of `grader=math`."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from dflash_mcmc.grading.math.deciding import decide
from dflash_mcmc.grading.math.self_test import self_test
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import ERROR, Decision

_GIBIBYTE = 1 << 30
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
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


def check() -> list[str]:
    """The failures of the self-test."""
    return self_test()


def judge(gold: str, answer: str, cpu_seconds: float) -> tuple[Decision, bool]:
    """(decision, verdict of the string rule). `cpu_seconds` limits the decision; see `within`."""
    return within(cpu_seconds, decide, gold, answer), same_string(gold, answer)


def within(cpu_seconds: float, rule: Callable[[str, str], Decision], gold: str, answer: str) -> Decision:
    """The decision of a rule within a limit on processor time.

    Processor time, unlike wall-clock time, does not depend on the load of the machine. The kernel kills the process at the
    limit, even during a long C call. An exception of the library gives the verdict `error`. If the memory is used up, the
    process exits, because the memory that is left might not be enough for the next answer.
    """
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


def limit_memory(gib: float) -> None:
    """Limits the address space of this process to `gib` GiB, or to the hard limit if that is lower."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = int(gib * _GIBIBYTE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


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
