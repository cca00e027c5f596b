"""The processes that grade mathematical answers, so that no text can delay or harm the run.

No model text is evaluated in the process of the run. A worker has limited memory, no network and no environment. A worker that
exceeds the time limit for an answer is killed and replaced, and so is a worker that something else kills. At its start the
first worker tests that known pairs are decided correctly with the installed libraries.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import verdicts
from dflash_mcmc.grading.extraction import Extracted, Extraction
from dflash_mcmc.grading.math.comparing import decide
from dflash_mcmc.grading.math.string_rule import same_string
from dflash_mcmc.grading.verdicts import Decision
from dflash_mcmc.process import stopping
from dflash_mcmc.types import Grade

EQUAL = (
    (r"\sqrt{12}", r"2\sqrt{3}"), ("(a+5)(b+2)", "ab+2a+5b+10"), ("3, 5, 7", "7, 5, 3"), ("52_8", "52_{8}"),
    (r"x \in [-2,7]", r"-2 \leq x \leq 7"), ("y = 2x + 3", "2x - y + 3 = 0"), (r"\cot x", r"\frac{1}{\tan x}"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\frac{1}{5}\begin{pmatrix} 1 \\ -18 \end{pmatrix}"), ("(1+i)^2", "2i"))
DIFFERENT = (("(0,1)", "[0,1)"), ("17_8", "17_9"), (r"\text{circle}", r"\text{line}"), ("3m+n", "3M+N"), (r"\sqrt{x^2}", "x"),
             (r"\frac{\pi}{3}+1", r"\frac\pi7+1"), (r"\$8", r"8\%"), ("x_1+x_2", "x_1+x_3"), ("3^{-80}", "3^{-81}"))
_INTEGER = re.compile(r"[+-]?\d{1,60}")
_START_SECONDS = 120
_WALL_PER_CPU = 10
"""Limit on wall-clock time as a multiple of the limit on processor time. It is large because a worker may wait for a busy
processor; it only ends answers that wait without using processor time."""
_MAX_LISTED, _MAX_RECORDED = 3, 1_000
"""Mistakes of the self-test that an error lists, and characters that are recorded of an answer longer than MAX_LENGTH."""
_PR_SET_PDEATHSIG, _CLONE_NEWUSER, _CLONE_NEWNET = 1, 0x10000000, 0x40000000
_OUT_OF_MEMORY = 86
"""Exit code of a worker that ran out of memory."""


def golds() -> list[str]:
    """The 500 gold answers of MATH-500, in the order of the dataset.

    They are of Hendrycks et al. 2021, arXiv 2103.03874, as split by Lightman et al. 2023; MIT, (c) 2021 Dan Hendrycks, (c)
    2023 OpenAI.
    """
    return Path(__file__).with_name("golds.txt").read_text(encoding="utf-8").splitlines()


def self_test() -> list[str]:
    """The pairs that are decided wrongly. The list is empty if the test passes.

    Each gold answer is compared with itself in braces, so that the strings differ and the answers are parsed. The test also
    triggers all lazy imports of the libraries, before the time of an answer is measured.
    """
    equal = [*((gold, f"{{ {gold} }}") for gold in golds()), *EQUAL]
    wrong = [f"{gold} = {answer}" for gold, answer in equal if decide(gold, answer).verdict != verdicts.CORRECT]
    return wrong + [f"{gold} != {answer}" for gold, answer in DIFFERENT if decide(gold, answer).verdict != verdicts.WRONG]


def confine(memory_gib: float, parent: int) -> None:
    """Restricts this process: no environment, which may contain access tokens, and no signals of the terminal.

    On Linux its memory is limited, it has no network if the kernel allows that, and the kernel kills it when the process
    `parent` ends for any reason, even during a long C call. macOS refuses limits of memory (python/cpython 78783).
    """
    if sys.platform == "linux":
        hard, limit = resource.getrlimit(resource.RLIMIT_AS)[1], int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has already ended
            os._exit(1)
        if libc.unshare(_CLONE_NEWNET):
            libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    if os.getpid() != os.getsid(0):
        os.setsid()
    os.environ.clear()


def begin(memory_gib: float, parent: int) -> None:
    """Imports the library, so that the time of an answer does not include the import, and restricts this process."""
    import math_verify  # noqa: F401

    confine(memory_gib, parent)
    logging.disable(logging.CRITICAL)


def _serve(pipe: Connection, start: Callable[[float, int], None], memory_gib: float, parent: int) -> None:
    """The main function of a grading process: starts, says so, and then replies to each call with (result, exception)."""
    start(memory_gib, parent)
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
        os._exit(_OUT_OF_MEMORY)
    except Exception as error:
        return Decision(verdicts.ERROR, "exception", type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Died(Exception):
    """A worker has ended during a call. `code` is its exit code, negative for a signal."""

    def __init__(self, code: int | None):
        super().__init__(verdicts.signal_name(-code) if code and code < 0 else f"exit code {code}")
        self.code = code


class _Process:
    """A grading process and the pipe to it."""

    def __init__(self, memory_gib: float):
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(other_end, begin, memory_gib, os.getpid()), daemon=True)
        self.process.start()
        other_end.close()

    def call(self, request: tuple[Callable, tuple] | None, seconds: float) -> Any:
        """The reply to (function, arguments), or the first one of the process, which is killed if there is none.

        Raises Died, TimeoutError, or the function's exception.
        """
        try:
            if request:
                self._pipe.send(request)
            if self._pipe.poll(seconds):
                value, error = self._pipe.recv()
                if error is not None:
                    raise error
                return value
            late = True
        except (EOFError, ConnectionError):
            late = False
        self.process.kill()
        self.process.join()
        raise TimeoutError(f"no reply in {seconds:g} s") if late else Died(self.process.exitcode)


class MathPool:
    """Grades texts in parallel with the run. Call `submit`; `finished` then yields the grades that are ready.

    Limits are `timeout_seconds` of processor time per answer and `memory_gib` GiB per worker. A worker that dies for another
    reason is replaced and the answer is graded again; when three have died during an answer, its verdict is `ungradable`. If
    the workers cannot run or fail their self-test, `finished` raises UserError, and no answer is decided.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, judge: Callable = judge,
                 extraction: Extraction = Extraction()):  # noqa: B008 - immutable
        """`judge` is a function with the signature of `judge`. Each worker starts with the first call in its thread."""
        self._timeout, self._memory, self._judge, self._extraction = timeout_seconds, memory_gib, judge, extraction
        # Workers inherit a blocked SIGINT: Ctrl-C must reach only the run, which stops its workers itself.
        self._threads = ThreadPoolExecutor(num_workers, "grader", signal.pthread_sigmask, (signal.SIG_BLOCK, {signal.SIGINT}))
        self._own, self._lock, self._closed = threading.local(), threading.Lock(), False
        self._workers: list[_Process] = []
        self._tested: Future | None = None
        self._futures: dict[Future[Grade], tuple[Hashable, Extracted]] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str, question: str = "") -> None:
        """Submits a text. Integers and texts without an answer need no process and are decided at once."""
        (found, grade), seconds = verdicts.timed(self._found, text, gold)
        if grade is None:
            assert found.answer is not None  # a text without an answer has its grade
            self._schedule(tag, found, found.answer, gold, question)
        else:
            self._decide(tag, grade._replace(grade_seconds=seconds), found)

    def _found(self, text: str, gold: str) -> tuple[Extracted, Grade | None]:
        """The answer in a text, and its grade if no process is needed for it."""
        found, grade = self._extraction.find(text), None
        if (answer := found.answer) is None:
            grade = Grade(verdicts.NO_ANSWER, None, found.rule)
        elif not answer:
            grade = Grade(verdicts.WRONG, "", "empty", same_string=False)
        elif len(answer) > verdicts.MAX_LENGTH:
            grade = Grade(verdicts.UNSUPPORTED, f"{answer[:_MAX_RECORDED]}...", "length", same_string=False)
        elif _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
            equal = int(answer) == int(gold)
            grade = Grade(verdicts.CORRECT if equal else verdicts.WRONG, answer, "integer", same_string=equal)
        return found, grade

    def submit_answer(self, tag: Hashable, answer: str, gold: str) -> None:
        """Submits an answer without its text. It is always decided by a grading process."""
        self._schedule(tag, Extracted(answer, "boxed"), answer, gold, "")

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) for the answers that are decided; with `wait`, waits for all that were submitted.

        Raises UserError if the grading processes do not work.
        """
        while True:
            self._check(wait and bool(self._futures))
            for future in [future for future in self._futures if future.done()]:
                tag, found = self._futures.pop(future)
                try:
                    self._decide(tag, future.result(), found)
                except Exception as error:
                    raise UserError(f"grader: grading processes stopped working: {type(error).__name__}: {error}; start the "
                                    "run again") from error
            while self._decided:
                yield self._decided.pop()
            if not (wait and self._futures):
                return
            stopping.wait_for(self._futures)

    def close(self) -> None:
        """Ends the processes and the threads. Unfinished answers are dropped."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.process.join()
        self._tested = None
        self._futures.clear()

    def _schedule(self, tag: Hashable, found: Extracted, answer: str, gold: str, question: str) -> None:
        if self._tested is None:
            self._tested = self._threads.submit(self._call, self_test, (), _START_SECONDS)
        self._futures[self._threads.submit(self._graded, answer, gold, question)] = tag, found

    def _check(self, wait: bool) -> None:
        """Raises UserError if the self-test has failed. With `wait`, waits for its result."""
        if self._tested is None or not (wait or self._tested.done()):
            return
        stopping.wait_for([self._tested])
        try:
            wrong = self._tested.result()
        except Exception as error:  # no answer can be graded, whatever the cause
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            self.close()  # the error covers all submitted answers and is raised once
            more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
            raise UserError(f"grader: grading processes cannot run: their self-test reports {'; '.join(wrong[:_MAX_LISTED])}"
                            f"{more}; check that this machine allows grader.memory_gib={self._memory:g}, that this is enough, "
                            "and that math-verify, sympy and latex2sympy2_extended have the versions in pyproject.toml")

    def _decide(self, tag: Hashable, grade: Grade, found: Extracted) -> None:
        rule = grade.rule if grade.verdict == verdicts.NO_ANSWER else self._extraction.named(found, grade.rule)
        self._decided.append((tag, grade._replace(rule=rule)))

    def _call(self, function: Callable, arguments: tuple, seconds: float) -> Any:
        """The result of a function in this thread's worker. Raises Died, TimeoutError, or the function's exception."""
        own = getattr(self._own, "worker", None)
        if own is None or not own.process.is_alive():
            with self._lock:
                if self._closed:
                    raise Died(None)
                own = self._own.worker = _Process(self._memory)
                self._workers = [*(worker for worker in self._workers if worker.process.is_alive()), own]
            own.call(None, _START_SECONDS)
        return own.call((function, arguments), seconds)

    def _graded(self, answer: str, gold: str, question: str) -> Grade:
        """The grade of an answer, in a thread of the pool."""
        reason, wall = "", _WALL_PER_CPU * self._timeout
        for _ in range(verdicts.MAX_DEATHS):
            try:
                (decision, same), seconds = self._call(
                    verdicts.timed, (self._judge, gold, answer, question, self._timeout), wall)
                return Grade(decision.verdict, answer, decision.rule, decision.reason, same, grade_seconds=seconds)
            except TimeoutError:
                return Grade(verdicts.TIMEOUT, answer, "timeout", grade_seconds=wall)
            except Died as died:
                if died.code == -signal.SIGPROF:
                    return Grade(verdicts.TIMEOUT, answer, "timeout", grade_seconds=self._timeout)
                if died.code == _OUT_OF_MEMORY:
                    return Grade(verdicts.ERROR, answer, "memory")
                reason = str(died)
        reason = f"the grading process died {verdicts.MAX_DEATHS} times, at last by {reason}"
        return Grade(verdicts.UNGRADABLE, answer, "process", reason)
