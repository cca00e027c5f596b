"""Mathematical answers: the last box of the text against the gold answer, decided by math-verify in a process of its own.

No model text is evaluated in the run's process, and none can hold it up: a worker has limited memory, and one that does
not answer in time is killed and replaced.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.errors import UserError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Grade

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pebble import ProcessPool

_INTEGER = re.compile(r"[+-]?\d{1,60}")
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_START_SECONDS = 120
_GIBIBYTE = 1 << 30
_PR_SET_PDEATHSIG = 1


@register("grader", "math")
@dataclass(slots=True, kw_only=True)
class MathGrader:
    """Last balanced box against the gold answer, by math-verify."""

    timeout_seconds: float = identity("an answer that takes longer to judge is wrong, with the reason timeout", gt=0)
    memory_gib: float = runtime("memory of a grading process, in GiB", ge=1, le=1024)
    num_workers: int = runtime("grading processes", ge=1)

    def start(self) -> MathPool:
        """The running pool of processes."""
        return MathPool(self)


class MathPool:
    """Grades texts beside the run. `submit`, then `finished` yields what has been decided.

    Only what an answer itself does counts against it. A worker that dies is replaced and the answer tried again; if
    workers cannot run at all, UserError is raised and nothing is decided.
    """

    def __init__(self, settings: MathGrader):
        self._settings, self._pool = settings, None
        self._futures: dict[Future, tuple[Hashable, str, str, int]] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Hands over a text. Whole numbers and texts without an answer are decided at once."""
        answer = extract_answer(text)
        grade = Grade("unparsed", None, "no_box") if answer is None else _compare_integers(answer, gold)
        if grade is not None:
            self._decided.append((tag, grade))
        else:
            self._schedule(tag, answer, gold, attempt=1)

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) of all that has been decided; with `wait`, of all that was submitted."""
        while self._decided or (wait and self._futures):
            for future in list(self._futures):
                if wait or future.done():
                    self._settle(future)
            while self._decided:
                yield self._decided.pop()
        for future in [future for future in self._futures if future.done()]:
            self._settle(future)
        while self._decided:
            yield self._decided.pop()

    def close(self) -> None:
        """Ends the processes. What was not finished is given up."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()

    def _schedule(self, tag: Hashable, answer: str, gold: str, attempt: int) -> None:
        if self._pool is None:
            self._pool = self._start()
        future = self._pool.schedule(_judge, (gold, answer), timeout=self._settings.timeout_seconds)
        self._futures[future] = (tag, answer, gold, attempt)

    def _start(self) -> ProcessPool:
        """A pool that has been seen to grade. Ctrl-C is for the run, which ends its workers itself: they inherit a block."""
        import multiprocessing

        from pebble import ProcessPool

        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool = ProcessPool(self._settings.num_workers, initializer=_confine,
                               initargs=(self._settings.memory_gib, os.getpid()),
                               context=multiprocessing.get_context("spawn"))
            first = pool.schedule(_judge, (r"\frac{1}{2}", r"\frac{2}{4}"), timeout=_START_SECONDS)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            result = first.result()
        except Exception as error:  # whatever keeps workers from running, no answer can be judged
            result = f"{type(error).__name__}: {error}"
        if result != (True, ""):
            pool.stop()
            pool.join()
            raise UserError(f"grader: grading processes cannot run: asked whether 2/4 is 1/2, they say {result}; does this "
                            f"machine allow grader.memory_gib={self._settings.memory_gib:g}, and is it enough?")
        return pool

    def _settle(self, future: Future) -> None:
        from concurrent.futures import TimeoutError as FutureTimeout

        from pebble import ProcessExpired

        tag, answer, gold, attempt = self._futures.pop(future)
        try:
            equal, error = future.result()
            grade = Grade("correct" if equal else "wrong", answer, error)
        except FutureTimeout:
            grade = Grade("wrong", answer, "timeout")
        except ProcessExpired:
            if attempt == 1:
                self._schedule(tag, answer, gold, attempt=2)
                return
            grade = Grade("wrong", answer, "error: the grading process died twice")
        except Exception as error:
            raise UserError(f"grader: grading processes stopped working: {type(error).__name__}: {error}; start the run again"
                            ) from error
        self._decided.append((tag, grade))


def extract_answer(text: str) -> str | None:
    """Content of the last balanced `\\boxed{...}` or `\\fbox{...}` behind the last `</think>`; None where there is none."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        return None
    for match in reversed(list(_BOX.finditer(text))):
        content = _balanced(text, match.end())
        if content is not None:
            return content.strip()
    return None


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify takes two LaTeX answers for the same. Runs in a worker process; gold comes first.

    The settings are the ones that had the fewest wrong acceptances on labelled pairs; without `$...$` the library
    would take another, looser path. A longer answer than 400 characters is not looked at.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    if len(answer) > 400:
        return False
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    # Without time limits of its own: those would make a slow answer a plain "not equal". The pool has the one limit.
    parsed = [parse(f"${side}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
              for side in (gold, answer)]
    return bool(verify(*parsed, float_rounding=15, numeric_precision=30, strict=True, allow_set_relation_comp=False,
                       timeout_seconds=None))


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start:position]
    return None


def _compare_integers(answer: str, gold: str) -> Grade | None:
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return Grade("correct" if int(answer) == int(gold) else "wrong", answer)
    return None


def _judge(gold: str, answer: str) -> tuple[bool, str]:
    """(equal, error): what the library raises on an answer is that answer's fault."""
    try:
        return equivalent(gold, answer), ""
    except Exception as error:
        return False, f"error: {type(error).__name__}"


def _confine(memory_gib: float, parent: int) -> None:
    """Limits a worker's memory, ties its life to the run's, and loads the library before any answer's time runs."""
    import ctypes
    import resource

    import math_verify  # noqa: F401

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = int(memory_gib * _GIBIBYTE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    # Linux: the kernel kills the worker when the run is gone, however it went, also in the midst of a long C call.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
