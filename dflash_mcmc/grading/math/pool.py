"""The pool of processes that grade mathematical answers, so that no text can delay or harm the run.

No model text is evaluated in the process of the run. A worker has limited memory, no network and no environment. A worker that
exceeds the time limit for an answer is killed and replaced. A worker that something else kills is replaced too.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading import verdicts
from dflash_mcmc.grading.extraction import Extracted, Extraction
from dflash_mcmc.grading.math import worker
from dflash_mcmc.types import Grade

_INTEGER = re.compile(r"[+-]?\d{1,60}")
_START_SECONDS = 120
_WALL_PER_CPU = 10
"""Limit on wall-clock time as a multiple of the limit on processor time. It is large because a worker may wait for a busy
processor; it only ends answers that wait without using processor time."""
_MAX_LISTED, _MAX_RECORDED = 3, 1_000
"""Mistakes of the self-test that an error lists, and characters that are recorded of an answer longer than MAX_LENGTH."""


class Died(Exception):
    """A worker has ended during a call. `code` is its exit code, negative for a signal."""

    def __init__(self, code: int | None):
        super().__init__(verdicts.signal_name(-code) if code and code < 0 else f"exit code {code}")
        self.code = code


class _Process:
    """A worker and the pipe to it."""

    def __init__(self, memory_gib: float):
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        arguments = other_end, worker.start, memory_gib, os.getpid()
        self.process = context.Process(target=worker.serve, args=arguments, daemon=True)
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
        except (EOFError, ConnectionError):
            self._kill()
            raise Died(self.process.exitcode) from None
        self._kill()
        raise TimeoutError(f"no reply in {seconds:g} s")

    def _kill(self) -> None:
        self.process.kill()
        self.process.join()


class _GradingThreads:
    """Threads with a worker each. A worker starts with the first call in its thread, and is replaced when it has died."""

    def __init__(self, num_workers: int, memory_gib: float):
        self._memory, self._own, self._closed = memory_gib, threading.local(), False
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        # Workers inherit a blocked SIGINT: Ctrl-C must reach only the run, which stops its workers itself.
        self.threads = ThreadPoolExecutor(num_workers, "grader", signal.pthread_sigmask, (signal.SIG_BLOCK, {signal.SIGINT}))

    def call(self, function: Callable, arguments: tuple, seconds: float) -> Any:
        """The result of a function in this thread's worker. Raises Died, TimeoutError, or the function's exception."""
        own = getattr(self._own, "process", None)
        if own is None or not own.process.is_alive():
            own = self._own.process = self._started()
        return own.call((function, arguments), seconds)

    def _started(self) -> _Process:
        for attempt in range(1, verdicts.MAX_DEATHS + 1):
            with self._lock:
                if self._closed:
                    raise Died(None)
                process = _Process(self._memory)
                self._processes = [*(one for one in self._processes if one.process.is_alive()), process]
            try:
                process.call(None, _START_SECONDS)
                return process
            except Died:
                if attempt == verdicts.MAX_DEATHS:
                    raise
        raise AssertionError

    def close(self) -> None:
        """Ends the workers and the threads. Calls that wait are dropped."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.process.kill()
        self.threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.process.join()


class _Submitted(NamedTuple):
    tag: Hashable
    gold: str
    question: str
    found: Extracted


class MathPool:
    """Grades texts in parallel with the run. Call `submit`; `finished` then yields the grades that are ready.

    Limits are `timeout_seconds` of processor time per answer and `memory_gib` GiB per worker. A worker that dies for another
    reason is replaced and the answer is graded again; when three have died during an answer, its verdict is `ungradable`. If
    the workers cannot run or fail their self-test, `finished` raises UserError, and no answer is decided.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, judge: Callable = worker.judge,
                 extraction: Extraction = Extraction()):  # noqa: B008 - immutable
        """`judge` is `worker.judge` or a function with the same signature."""
        self._timeout, self._memory, self._num_workers = timeout_seconds, memory_gib, num_workers
        self._judge, self._extraction = judge, extraction
        self._workers: _GradingThreads | None = None
        self._checked: Future | None = None
        self._futures: dict[Future[Grade], _Submitted] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str, question: str = "") -> None:
        """Submits a text. Integers and texts without an answer need no process and are decided at once."""
        (found, grade), seconds = verdicts.timed(self._found, text, gold)
        if grade is None:
            self._schedule(_Submitted(tag, gold, question, found))
        else:
            self._decide(tag, grade._replace(grade_seconds=seconds), found)

    def _found(self, text: str, gold: str) -> tuple[Extracted, Grade | None]:
        """The answer in a text, and its grade if no process is needed for it."""
        found = self._extraction.find(text)
        answer = found.answer
        if answer is None:
            return found, Grade(verdicts.NO_ANSWER, None, found.rule)
        if not answer:
            return found, Grade(verdicts.WRONG, "", "empty", same_string=False)
        if len(answer) > verdicts.MAX_LENGTH:
            return found, Grade(verdicts.UNSUPPORTED, f"{answer[:_MAX_RECORDED]}...", "length", same_string=False)
        if not (_INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold)):
            return found, None
        equal = int(answer) == int(gold)
        return found, Grade(verdicts.CORRECT if equal else verdicts.WRONG, answer, "integer", same_string=equal)

    def submit_answer(self, tag: Hashable, answer: str, gold: str) -> None:
        """Submits an answer without its text. It is always decided by a grading process."""
        self._schedule(_Submitted(tag, gold, "", Extracted(answer, "boxed")))

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) for the answers that are decided; with `wait`, waits for all that were submitted.

        Raises UserError if the grading processes do not work.
        """
        while True:
            self._check(wait and bool(self._futures))
            for future in [future for future in self._futures if future.done()]:
                submitted = self._futures.pop(future)
                try:
                    self._decide(submitted.tag, future.result(), submitted.found)
                except Exception as error:
                    raise UserError(f"grader: grading processes stopped working: {type(error).__name__}: {error}; start the "
                                    "run again") from error
            while self._decided:
                yield self._decided.pop()
            if not (wait and self._futures):
                return
            wait_for(self._futures, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Stops the processes. Unfinished answers are dropped."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _schedule(self, submitted: _Submitted) -> None:
        if self._workers is None:
            self._workers = _GradingThreads(self._num_workers, self._memory)
            self._checked = self._workers.threads.submit(self._workers.call, worker.self_test, (), _START_SECONDS)
        self._futures[self._workers.threads.submit(self._graded, self._workers, submitted)] = submitted

    def _check(self, wait: bool) -> None:
        """Raises UserError if the self-test has failed. With `wait`, waits for its result."""
        if self._checked is None or not (wait or self._checked.done()):
            return
        try:
            wrong = self._checked.result()
        except Exception as error:  # no answer can be graded, whatever the cause
            wrong = [f"{type(error).__name__}: {error}"]
        self._checked = None
        if wrong:
            self.close()
            self._futures.clear()  # the error covers all submitted answers and is raised once
            more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
            first = "; ".join(wrong[:_MAX_LISTED]) + more
            raise UserError(f"grader: grading processes cannot run: their self-test reports {first}; check "
                            f"that this machine allows grader.memory_gib={self._memory:g}, that this is enough, and that "
                            "math-verify, sympy and latex2sympy2_extended have the versions in pyproject.toml")

    def _decide(self, tag: Hashable, grade: Grade, found: Extracted) -> None:
        rule = grade.rule if grade.verdict == verdicts.NO_ANSWER else self._extraction.named(found, grade.rule)
        self._decided.append((tag, grade._replace(rule=rule)))

    def _graded(self, workers: _GradingThreads, submitted: _Submitted) -> Grade:
        """The grade of an answer, in a thread of the pool."""
        answer, reason, wall = submitted.found.answer, "", _WALL_PER_CPU * self._timeout
        for _ in range(verdicts.MAX_DEATHS):
            try:
                (decision, same_string), seconds = workers.call(
                    verdicts.timed, (self._judge, submitted.gold, answer, submitted.question, self._timeout), wall)
                return Grade(decision.verdict, answer, decision.rule, decision.reason, same_string, grade_seconds=seconds)
            except TimeoutError:
                return Grade(verdicts.TIMEOUT, answer, "timeout", grade_seconds=wall)
            except Died as died:
                if died.code == -signal.SIGPROF:
                    return Grade(verdicts.TIMEOUT, answer, "timeout", grade_seconds=self._timeout)
                if died.code == worker.OUT_OF_MEMORY:
                    return Grade(verdicts.ERROR, answer, "memory")
                reason = str(died)
        reason = f"the grading process died {verdicts.MAX_DEATHS} times, at last by {reason}"
        return Grade(verdicts.UNGRADABLE, answer, "process", reason)
