"""The pool of grading processes: texts go in, grades come out, and no text can hold up or harm the run.

No model text is evaluated in the run's process. A worker has limited memory, no network and no environment; one that uses up
an answer's time is killed and replaced.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.grading.extraction import behind_thinking, last_box
from dflash_mcmc.grading.limits import MAX_LENGTH
from dflash_mcmc.grading.math import worker
from dflash_mcmc.grading.verdicts import CORRECT, ERROR, NO_ANSWER, TIMEOUT, UNSUPPORTED, WRONG
from dflash_mcmc.types import Grade

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pebble import ProcessPool

_INTEGER = re.compile(r"[+-]?\d{1,60}")
_START_SECONDS = 120
_WALL_PER_CPU = 10
"""A worker's wall clock goes on while others run: it only ends what the processor's time does not."""
_TOLD = 3
"""Mistakes of the self-test that a message tells."""
_KEPT = 1_000
"""Characters of an answer that are recorded. The text has all of them."""


class _SubmittedText(NamedTuple):
    tag: Hashable
    answer: str
    gold: str
    attempt: int


class MathPool:
    """Grades texts beside the run. `submit`, then `finished` yields what has been decided.

    Only what an answer itself does counts against it. A worker that something else ends is replaced and the answer tried
    again; if workers cannot run at all, or fail their self-test, UserError is raised and nothing is decided.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, judge: Callable = worker.judge):
        """`judge` is `worker.judge`, or another function of gold answer, answer and seconds that says the same things."""
        self._timeout, self._memory, self._workers = timeout_seconds, memory_gib, num_workers
        self._judge = judge
        self._pool: ProcessPool | None = None
        self._checked: Future | None = None
        self._futures: dict[Future, _SubmittedText] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Hands over a text. What needs no process, whole numbers and texts without an answer, is decided at once."""
        graded = at_once(text, gold)
        if graded is not None:
            self._decided.append((tag, graded))
        else:
            self.submit_answer(tag, last_box(text), gold)

    def submit_answer(self, tag: Hashable, answer: str, gold: str) -> None:
        """Hands over an answer by itself, for a process to decide whatever it is."""
        self._schedule(_SubmittedText(tag, answer, gold, attempt=1))

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) of all that has been decided; with `wait`, of all that was submitted. Raises UserError."""
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
        """Ends the processes. What was not finished is given up."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _schedule(self, submitted: _SubmittedText) -> None:
        if self._pool is None:
            self._start()
        future = self._pool.schedule(self._judge, (submitted.gold, submitted.answer, self._timeout),
                                     timeout=_WALL_PER_CPU * self._timeout)
        self._futures[future] = submitted

    def _start(self) -> None:
        """Starts the workers and their self-test, and waits for neither.

        Ctrl-C is for the run, which ends its workers itself: they inherit a block.
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

    def _check(self, wait: bool) -> None:
        """Raises UserError where the self-test went wrong."""
        if self._checked is None or not (wait or self._checked.done()):
            return
        try:
            wrong = self._checked.result()
        except Exception as error:  # whatever keeps workers from running, no answer can be judged
            wrong = [f"{type(error).__name__}: {error}"]
        self._checked = None
        if wrong:
            self.close()
            self._futures.clear()  # what was handed over is told of by what is raised, once
            raise UserError(f"grader: grading processes cannot run: their self-test says {_some(wrong)}; does this "
                            f"machine allow grader.memory_gib={self._memory:g}, is it enough, and are math-verify, sympy and "
                            "latex2sympy2_extended of the versions in pyproject.toml?")

    def _settle(self, future: Future) -> None:
        submitted = self._futures.pop(future)
        graded = self._graded(future, submitted)
        if graded is None:
            self._schedule(submitted._replace(attempt=2))
        else:
            self._decided.append((submitted.tag, graded))

    def _graded(self, future: Future, submitted: _SubmittedText) -> Grade | None:
        """The grade of a finished answer; None where it is to be tried again."""
        from concurrent.futures import TimeoutError as FutureTimeout

        from pebble import ProcessExpired

        answer = submitted.answer
        try:
            decision, same_string = future.result()
            return Grade(decision.verdict, answer, decision.rule, decision.reason, same_string)
        except FutureTimeout:
            return Grade(TIMEOUT, answer, "timeout")
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGPROF:
                return Grade(TIMEOUT, answer, "timeout")
            if error.exitcode == worker.OUT_OF_MEMORY:
                return Grade(ERROR, answer, "memory")
            return None if submitted.attempt == 1 else Grade(ERROR, answer, "process", "the grading process died twice")
        except Exception as error:
            raise UserError(f"grader: grading processes stopped working: {type(error).__name__}: {error}; start the run again"
                            ) from error


def _some(wrong: list[str]) -> str:
    more = f" and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
    return "; ".join(wrong[:_TOLD]) + more


def at_once(text: str, gold: str) -> Grade | None:
    """The grade of a text that no process is needed for; None where one is."""
    answer = last_box(text)
    if answer is None:
        return Grade(NO_ANSWER, None, "no_box" if behind_thinking(text) is not None else "unfinished_thinking")
    if not answer:
        return Grade(WRONG, "", "empty", same_string=False)
    if len(answer) > MAX_LENGTH:
        return Grade(UNSUPPORTED, f"{answer[:_KEPT]}...", "length", same_string=False)
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        equal = int(answer) == int(gold)
        return Grade(CORRECT if equal else WRONG, answer, "integer", same_string=equal)
    return None
