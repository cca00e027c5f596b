"""The processes that grade mathematical answers, so that no text can delay or harm the run.

No model text is evaluated in the process of the run. A worker has limited memory, no network and no environment. A worker that
exceeds the time limit for an answer is killed and replaced, and so is a worker that something else kills. At its start the
first worker tests that known pairs are decided correctly with the installed libraries.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import verdicts
from dflash_mcmc.grading.extraction import Extracted, Extraction
from dflash_mcmc.grading.math import comparing, string_rule
from dflash_mcmc.process.worker import Died, WorkerProcess, confine
from dflash_mcmc.types import Grade

EQUAL = (
    (r"\sqrt{12}", r"2\sqrt{3}"), ("(a+5)(b+2)", "ab+2a+5b+10"), ("3, 5, 7", "7, 5, 3"), ("52_8", "52_{8}"),
    (r"x \in [-2,7]", r"-2 \leq x \leq 7"), ("y = 2x + 3", "2x - y + 3 = 0"), (r"\cot x", r"\frac{1}{\tan x}"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\frac{1}{5}\begin{pmatrix} 1 \\ -18 \end{pmatrix}"), ("(1+i)^2", "2i"))
DIFFERENT = (("(0,1)", "[0,1)"), ("17_8", "17_9"), (r"\text{circle}", r"\text{line}"), ("3m+n", "3M+N"), (r"\sqrt{x^2}", "x"),
             (r"\frac{\pi}{3}+1", r"\frac\pi7+1"), (r"\$8", r"8\%"), ("x_1+x_2", "x_1+x_3"), ("3^{-80}", "3^{-81}"))
_INTEGER = re.compile(r"[+-]?\d{1,60}")
_TEST_SECONDS = 120
_WALL_PER_CPU = 10
"""Limit on wall-clock time as a multiple of the limit on processor time. It is large because a worker may wait for a busy
processor; it only ends answers that wait without using processor time."""
_MAX_LISTED, _MAX_RECORDED = 3, 1_000
"""Mistakes of the self-test that an error lists, and characters that are recorded of an answer longer than MAX_LENGTH."""
_OUT_OF_MEMORY = 86
"""Exit code of a worker that ran out of memory."""


def self_test() -> list[str]:
    """The pairs that are decided wrongly. The list is empty if the test passes.

    Each gold answer of MATH-500 is compared with itself in braces, so that the strings differ and the answers are parsed. The
    answers are of Hendrycks et al. 2021, arXiv 2103.03874, as split by Lightman et al. 2023; MIT, (c) 2021 Dan Hendrycks, (c)
    2023 OpenAI. The test also triggers all lazy imports of the libraries, before the time of an answer is measured.
    """
    golds = Path(__file__).with_name("golds.txt").read_text(encoding="utf-8").splitlines()
    equal = [*((gold, f"{{ {gold} }}") for gold in golds), *EQUAL]
    wrong = [f"{gold} = {answer}" for gold, answer in equal if comparing.decide(gold, answer).verdict != verdicts.CORRECT]
    return wrong + [f"{gold} != {answer}" for gold, answer in DIFFERENT
                    if comparing.decide(gold, answer).verdict != verdicts.WRONG]


def begin(memory_gib: float, parent: int) -> None:
    """Imports the library, so that the time of an answer does not include the import, and restricts this process."""
    import math_verify  # noqa: F401

    confine(memory_gib, parent)
    logging.disable(logging.CRITICAL)


def judge(gold: str, answer: str, question: str, cpu_seconds: float) -> tuple[verdicts.Decision, bool]:
    """(decision, verdict of the string rule). `cpu_seconds` limits the decision; see `within`."""
    return within(cpu_seconds, comparing.decide, gold, answer, question), string_rule.same_string(gold, answer)


def within(cpu_seconds: float, rule: Callable[..., verdicts.Decision], *arguments: str) -> verdicts.Decision:
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
        os._exit(_OUT_OF_MEMORY)
    except Exception as error:
        return verdicts.Decision(verdicts.ERROR, "exception", type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class MathPool(verdicts.GradesInThreads):
    """Grades texts in processes, one for each thread, in parallel with the run.

    Limits are `timeout_seconds` of processor time per answer and `memory_gib` GiB per worker. A worker that dies for another
    reason is replaced and the answer is graded again; when three have died during an answer, its verdict is `ungradable`. If
    the workers cannot run or fail their self-test, `finished` raises UserError, and no answer is decided.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, judge: Callable = judge,
                 extraction: Extraction = Extraction()):  # noqa: B008 - immutable
        """`judge` is a function with the signature of `judge`. Each worker starts with the first call in its thread."""
        super().__init__(num_workers)
        self._timeout, self._memory, self._judge, self._extraction = timeout_seconds, memory_gib, judge, extraction
        self._own, self._lock, self._closed = threading.local(), threading.Lock(), False
        self._workers: list[WorkerProcess] = []
        self._tested: Future[list[str]] | None = None

    def submit(self, tag: Hashable, text: str, gold: str, question: str = "") -> None:
        """Submits a text. Integers and texts without an answer need no process and are decided at once."""
        started = time.perf_counter()
        found = self._extraction.find(text)
        answer = found.answer
        if answer is None:
            grade = Grade(verdicts.NO_ANSWER, None, found.rule)
        elif not answer:
            grade = self._grade(found, verdicts.WRONG, "empty", same_string=False)
        elif len(answer) > verdicts.MAX_LENGTH:
            short = found._replace(answer=f"{answer[:_MAX_RECORDED]}...")
            grade = self._grade(short, verdicts.UNSUPPORTED, "length", same_string=False)
        elif _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
            equal = int(answer) == int(gold)
            grade = self._grade(found, verdicts.CORRECT if equal else verdicts.WRONG, "integer", same_string=equal)
        else:
            return self._decide(tag, found, gold, question)
        self.decided(tag, grade._replace(grade_seconds=time.perf_counter() - started))

    def submit_answer(self, tag: Hashable, answer: str, gold: str) -> None:
        """Submits an answer without its text. It is always decided by a grading process."""
        self._decide(tag, Extracted(answer, "boxed"), gold, "")

    def close(self) -> None:
        """Ends the processes and the threads. Unfinished answers are dropped."""
        with self._lock:
            self._closed = True
            for own in self._workers:
                own.end()
        super().close()

    def _grade(self, found: Extracted, verdict: str, rule: str, reason: str = "", **values: Any) -> Grade:
        return Grade(verdict, found.answer, self._extraction.named(found, rule), reason, **values)

    def _decide(self, tag: Hashable, *answer: Any) -> None:
        if self._tested is None:
            self._tested = self._threads.submit(self._call, _TEST_SECONDS, self_test)
        self.decide(tag, self._graded, *answer)

    def _call(self, seconds: float, *request: Any) -> Any:
        """The result of a function in this thread's worker. Raises Died, TimeoutError, or the function's exception."""
        own = getattr(self._own, "worker", None)
        if own is None or not own.process.is_alive():
            with self._lock:
                if self._closed:
                    raise Died(None)
                own = self._own.worker = WorkerProcess(begin, self._memory, os.getpid())
                self._workers = [*(other for other in self._workers if other.process.is_alive()), own]
        return own.call(seconds, *request)

    def _graded(self, found: Extracted, gold: str, question: str) -> Grade:
        """The grade of an answer, in a thread of the pool. Raises UserError if the grading processes do not work."""
        assert self._tested is not None  # it is submitted before the first answer
        try:
            wrong = self._tested.result()
        except Exception as error:  # no answer can be graded, whatever the cause
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
            raise UserError(f"grader: grading processes cannot run: their self-test reports {'; '.join(wrong[:_MAX_LISTED])}"
                            f"{more}; check that this machine allows grader.memory_gib={self._memory:g}, that this is enough, "
                            "that math-verify, sympy and latex2sympy2_extended have the versions in pyproject.toml, and that "
                            "a script of your own runs below `if __name__ == \"__main__\":`")
        wall = _WALL_PER_CPU * self._timeout
        for _ in range(verdicts.MAX_DEATHS):
            try:
                (decision, same), seconds = self._call(
                    wall, verdicts.timed, self._judge, gold, found.answer, question, self._timeout)
                return self._grade(found, *decision, same_string=same, grade_seconds=seconds)
            except TimeoutError:
                return self._grade(found, verdicts.TIMEOUT, "timeout", grade_seconds=wall)
            except Died as died:
                code = died.args[0]
            except Exception as error:
                raise UserError(f"grader: grading processes stopped working: {type(error).__name__}: {error}; start the run "
                                "again") from error
            if code == -signal.SIGPROF:
                return self._grade(found, verdicts.TIMEOUT, "timeout", grade_seconds=self._timeout)
            if code == _OUT_OF_MEMORY:
                return self._grade(found, verdicts.ERROR, "memory")
        last = verdicts.signal_name(-code) if code and code < 0 else f"exit code {code}"
        return self._grade(found, verdicts.UNGRADABLE, "process",
                           f"the grading process died {verdicts.MAX_DEATHS} times, at last by {last}")
