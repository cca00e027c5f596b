"""The verdicts on a sample, and the limits on answers, so that each answer is handled in bounded time."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from dflash_mcmc.process import stopping
from dflash_mcmc.types import Grade

_Result = TypeVar("_Result")

CORRECT, WRONG, NO_ANSWER = "correct", "wrong", "no_answer"
UNSUPPORTED, TIMEOUT, ERROR, UNGRADABLE = "unsupported", "timeout", "error", "ungradable"
NOT_DRAWN, TOO_LONG = "not_drawn", "too_long"
GIVEN = (CORRECT, WRONG, NO_ANSWER, UNSUPPORTED, TIMEOUT, ERROR, UNGRADABLE)
"""The verdicts of a grader. The last four mean that the comparison was not completed: the answer exceeded a limit, the time
ran out, the grading failed, or something else killed the grading process MAX_DEATHS times."""
MAX_DEATHS = 3
"""Deaths of grading processes by something else during one answer, after which its verdict is UNGRADABLE."""
UNDRAWN = (NOT_DRAWN, TOO_LONG)
"""The verdicts of records without a text. TOO_LONG: prompt and answer do not fit into the model's positions."""
VERDICTS = (*GIVEN, *UNDRAWN)
"""All verdicts of records."""


class GradingPool(Protocol):
    """Grades texts while the run continues."""

    def submit(self, tag: Any, text: str, gold: str, question: str = "") -> None:
        """Hands over a text, and the question if the form that it asks for counts.

        Raises UserError for a gold answer that no text can be compared with.
        """

    def finished(self, wait: bool = False) -> Iterator[tuple[Any, Grade]]:
        """Yields (tag, grade) of each graded text. With `wait` it waits until all submitted texts are graded."""

    def close(self) -> None:
        """Ends the pool's processes."""


class GradesAtOnce:
    """A pool without processes, for a rule that takes no time: it maps text, gold answer and question to a grade."""

    def __init__(self, rule: Callable[[str, str, str], Grade]):
        self._rule = rule
        self._graded_texts: list[tuple[Any, Grade]] = []

    def submit(self, tag: Any, text: str, gold: str, question: str = "") -> None:
        """Grades a text."""
        graded, seconds = timed(self._rule, text, gold, question)
        self._graded_texts.append((tag, graded._replace(grade_seconds=seconds)))

    def finished(self, wait: bool = False) -> Iterator[tuple[Any, Grade]]:
        """Yields (tag, grade) for every text that was not yielded yet."""
        while self._graded_texts:
            yield self._graded_texts.pop(0)

    def close(self) -> None:
        """Does nothing: there are no processes to end."""


class GradesInThreads:
    """A pool of threads, for a rule that waits for a process or a model. `finished` raises what the rule raises."""

    def __init__(self, num_workers: int):
        self._threads = ThreadPoolExecutor(num_workers, "grader")
        self._futures: dict[Future[Grade], Any] = {}

    def decide(self, tag: Any, rule: Callable[..., Grade], *arguments: Any) -> None:
        """Hands a text, or its answer, to the rule."""
        self._futures[self._threads.submit(rule, *arguments)] = tag

    def decided(self, tag: Any, grade: Grade) -> None:
        """Takes a grade that needs no thread."""
        future: Future[Grade] = Future()
        future.set_result(grade)
        self._futures[future] = tag

    def finished(self, wait: bool = False) -> Iterator[tuple[Any, Grade]]:
        """Yields (tag, grade) for the texts that are decided; with `wait`, waits for all that were submitted.

        An exception of the rule covers all submitted texts and is raised once.
        """
        while self._futures:
            for future in [future for future in self._futures if future.done()]:
                tag = self._futures.pop(future)
                if future.exception():
                    self._futures.clear()
                yield tag, future.result()
            if not wait:
                return
            if self._futures:
                stopping.wait_for(self._futures)

    def close(self) -> None:
        """Waits for the rules that are under way, and drops the texts that wait."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._futures.clear()


class Decision(NamedTuple):
    """The verdict on an answer and the rule that led to it."""

    verdict: str
    """One of GIVEN."""
    rule: str
    """The rule that decided; for `unsupported`, the limit that was exceeded."""
    reason: str = ""
    """Further detail that the rule's name does not give: the name of an exception or of a signal."""


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def timed(function: Callable[..., _Result], *arguments: object) -> tuple[_Result, float]:
    """(the result of a function, its seconds on the wall clock)."""
    started = time.perf_counter()
    return function(*arguments), time.perf_counter() - started


MAX_LENGTH = 400
"""The largest number of characters in an answer."""
MAX_DIGITS = 60
"""The largest number of consecutive digits."""
MAX_NESTING = 25
"""The largest depth of nested brackets."""
MAX_EXPONENT = 9_999
"""Largest absolute exponent of a number, also in scientific notation."""
MAX_FACTORIAL = 999
"""Largest argument of a factorial and of a binomial coefficient."""
MAX_BITS = 250_000
"""The largest number of bits in the numerator or denominator of an exact number."""

_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_BRACKET = re.compile(r"(\\?[{(\[]|\\left(?![a-zA-Z])|\\begin)|(\\?[})\]]|\\right(?![a-zA-Z])|\\end)")


class Unsupported(Exception):
    """An answer exceeds a limit. The message is the name of the limit."""


def check_size(answer: str) -> None:
    """Raises Unsupported for an answer that is too long, has too many consecutive digits, or nests brackets too deeply."""
    if len(answer) > MAX_LENGTH:
        raise Unsupported("length")
    if _DIGITS.search(answer):
        raise Unsupported("digits")
    depth = 0
    for bracket in _BRACKET.finditer(answer):
        depth += 1 if bracket.group(1) else -1
        if depth > MAX_NESTING:
            raise Unsupported("nesting")
