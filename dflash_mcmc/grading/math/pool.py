"""The pool of processes that grade mathematical answers, so that no text can delay or harm the run.

No model text is evaluated in the process of the run. A worker has limited memory, no network and no environment. A worker that
exceeds the time limit for an answer is killed and replaced.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import Extracted, Extraction
from dflash_mcmc.grading.limits import MAX_LENGTH
from dflash_mcmc.grading.math import worker
from dflash_mcmc.grading.timing import timed
from dflash_mcmc.grading.verdicts import CORRECT, ERROR, NO_ANSWER, TIMEOUT, UNSUPPORTED, WRONG
from dflash_mcmc.types import Grade

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pebble import ProcessPool

_INTEGER = re.compile(r"[+-]?\d{1,60}")
_START_SECONDS = 120
_WALL_PER_CPU = 10
"""Limit on wall-clock time as a multiple of the limit on processor time. It is large because a worker may wait for a busy
processor; it only ends answers that wait without using processor time."""
_MAX_LISTED = 3
"""Number of mistakes of the self-test that an error message lists."""
_MAX_RECORDED = 1_000
"""The number of characters that are recorded of an answer longer than MAX_LENGTH. The record's text is complete."""


class _SubmittedText(NamedTuple):
    tag: Hashable
    answer: str
    gold: str
    attempt: int
    found: Extracted


class MathPool:
    """Grades texts in parallel with the run. Call `submit`; `finished` then yields the grades that are ready.

    Limits are `timeout_seconds` of processor time per answer and `memory_gib` GiB per worker. A worker that dies for another
    reason is replaced and the answer is tried once more. If the workers cannot run or fail their self-test, `finished` raises
    UserError, and no answer is decided.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, judge: Callable = worker.judge,
                 extraction: Extraction = Extraction()):  # noqa: B008 - immutable
        """`judge` is `worker.judge` or a function with the same signature."""
        self._timeout, self._memory, self._workers = timeout_seconds, memory_gib, num_workers
        self._judge, self._extraction = judge, extraction
        self._pool: ProcessPool | None = None
        self._checked: Future | None = None
        self._futures: dict[Future, _SubmittedText] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Submits a text. Integers and texts without an answer need no process and are decided at once."""
        (found, graded), seconds = timed(self._found, text, gold)
        if found.answer is None:
            self._decided.append((tag, Grade(NO_ANSWER, None, found.rule, grade_seconds=seconds)))
        elif graded is not None:
            self._decide(tag, graded._replace(grade_seconds=seconds), found)
        else:
            self._schedule(_SubmittedText(tag, found.answer, gold, attempt=1, found=found))

    def _found(self, text: str, gold: str) -> tuple[Extracted, Grade | None]:
        """The answer in a text, and its grade if no process is needed for it."""
        found = self._extraction.find(text)
        return found, None if found.answer is None else _at_once(found.answer, gold)

    def submit_answer(self, tag: Hashable, answer: str, gold: str) -> None:
        """Submits an answer without its text. It is always decided by a grading process."""
        self._schedule(_SubmittedText(tag, answer, gold, attempt=1, found=Extracted(answer, "boxed")))

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) for the answers that are decided; with `wait`, waits for all that were submitted.

        Raises UserError if the grading processes do not work.
        """
        while self._decided or (wait and self._futures):
            self._check(wait)
            for future in list(self._futures):
                if wait or future.done():
                    self._settle(future)
            while self._decided:
                yield self._decided.pop()
        self._check(wait=False)
        for future in [future for future in self._futures if future.done()]:
            self._settle(future)
        while self._decided:
            yield self._decided.pop()

    def close(self) -> None:
        """Stops the processes. Unfinished answers are dropped."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _schedule(self, submitted: _SubmittedText) -> None:
        pool = self._start() if self._pool is None else self._pool
        future = pool.schedule(timed, (self._judge, submitted.gold, submitted.answer, self._timeout),
                               timeout=_WALL_PER_CPU * self._timeout)
        self._futures[future] = submitted

    def _start(self) -> ProcessPool:
        """Starts the workers and their self-test without waiting for them.

        The workers inherit a blocked SIGINT: Ctrl-C must reach only the run, which stops its workers itself.
        """
        import multiprocessing

        from pebble import ProcessPool

        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pool = ProcessPool(self._workers, initializer=worker.start, initargs=(self._memory, os.getpid()),
                                     context=multiprocessing.get_context("spawn"))
            self._checked = self._pool.schedule(worker.check, timeout=_START_SECONDS)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._pool

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
            raise UserError(f"grader: grading processes cannot run: their self-test reports {_first_few(wrong)}; check "
                            f"that this machine allows grader.memory_gib={self._memory:g}, that this is enough, and that "
                            "math-verify, sympy and latex2sympy2_extended have the versions in pyproject.toml")

    def _settle(self, future: Future) -> None:
        submitted = self._futures.pop(future)
        graded = self._graded(future, submitted)
        if graded is None:
            self._schedule(submitted._replace(attempt=2))
        else:
            self._decide(submitted.tag, graded, submitted.found)

    def _decide(self, tag: Hashable, graded: Grade, found: Extracted) -> None:
        self._decided.append((tag, graded._replace(rule=self._extraction.named(found, graded.rule))))

    def _graded(self, future: Future, submitted: _SubmittedText) -> Grade | None:
        """The grade of a finished answer; None if the worker died and the answer must be tried again."""
        from concurrent.futures import TimeoutError as FutureTimeout

        from pebble import ProcessExpired

        answer = submitted.answer
        try:
            (decision, same_string), seconds = future.result()
            return Grade(decision.verdict, answer, decision.rule, decision.reason, same_string, grade_seconds=seconds)
        except FutureTimeout:
            return Grade(TIMEOUT, answer, "timeout", grade_seconds=_WALL_PER_CPU * self._timeout)
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGPROF:
                return Grade(TIMEOUT, answer, "timeout", grade_seconds=self._timeout)
            if error.exitcode == worker.OUT_OF_MEMORY:
                return Grade(ERROR, answer, "memory")
            return None if submitted.attempt == 1 else Grade(ERROR, answer, "process", "the grading process died twice")
        except Exception as error:
            raise UserError(f"grader: grading processes stopped working: {type(error).__name__}: {error}; start the run again"
                            ) from error


def _first_few(wrong: list[str]) -> str:
    more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
    return "; ".join(wrong[:_MAX_LISTED]) + more


def _at_once(answer: str, gold: str) -> Grade | None:
    """The grade of an answer that needs no grading process; None if it needs one."""
    if not answer:
        return Grade(WRONG, "", "empty", same_string=False)
    if len(answer) > MAX_LENGTH:
        return Grade(UNSUPPORTED, f"{answer[:_MAX_RECORDED]}...", "length", same_string=False)
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        equal = int(answer) == int(gold)
        return Grade(CORRECT if equal else WRONG, answer, "integer", same_string=equal)
    return None
