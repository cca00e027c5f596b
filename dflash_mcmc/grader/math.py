"""Mathematical answers: the last box of the text against the gold answer, decided by math-verify in a process of its own.

No model text is evaluated in the run's process, and none can hold it up: a worker has limited memory, and one that does
not answer in time is killed and replaced.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.registry import register
from dflash_mcmc.types import Grade

if TYPE_CHECKING:
    from concurrent.futures import Future

_INTEGER = re.compile(r"[+-]?\d{1,60}")
_BOX = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{")
_INNER_SECONDS = 3
_GIBIBYTE = 1 << 30


@register("grader", "math")
@dataclass(slots=True, kw_only=True)
class MathGrader:
    """Last balanced box against the gold answer, by math-verify."""

    timeout_seconds: float = identity("an answer that takes longer to judge is wrong, with the reason timeout", gt=0)
    memory_gib: float = runtime("memory of a grading process, in GiB", ge=1)
    num_workers: int = runtime("grading processes", ge=1)

    def start(self) -> MathPool:
        """The running pool of processes."""
        return MathPool(self)


class MathPool:
    """Grades texts beside the run. `submit`, then `finished` yields what has been decided."""

    def __init__(self, settings: MathGrader):
        import multiprocessing

        from pebble import ProcessPool

        self._settings = settings
        self._futures: dict[Future, tuple[Hashable, str]] = {}
        self._decided: list[tuple[Hashable, Grade]] = []
        self._pool = ProcessPool(settings.num_workers, initializer=_limit_memory, initargs=(settings.memory_gib,),
                                 context=multiprocessing.get_context("spawn"))

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Hands over a text. Whole numbers and texts without an answer are decided at once."""
        answer = extract_answer(text)
        grade = None if answer is None else _compare_integers(answer, gold)
        if answer is None:
            grade = Grade("unparsed", None, "no_box")
        if grade is not None:
            self._decided.append((tag, grade))
            return
        future = self._pool.schedule(equivalent, (gold, answer), timeout=self._settings.timeout_seconds)
        self._futures[future] = (tag, answer)

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) of all that has been decided; with `wait`, of all that was submitted."""
        while self._decided:
            yield self._decided.pop()
        for future in list(self._futures):
            if wait or future.done():
                tag, answer = self._futures.pop(future)
                yield tag, _verdict(future, answer)

    def close(self) -> None:
        """Ends the processes. What was not finished is given up."""
        self._pool.stop()
        self._pool.join()


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
    parsed = [parse(f"${side}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=_INNER_SECONDS)
              for side in (gold, answer)]
    return bool(verify(*parsed, float_rounding=15, numeric_precision=30, strict=True, allow_set_relation_comp=False,
                       timeout_seconds=_INNER_SECONDS))


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


def _verdict(future: Future, answer: str) -> Grade:
    from concurrent.futures import TimeoutError as FutureTimeout

    try:
        return Grade("correct" if future.result() else "wrong", answer)
    except FutureTimeout:
        return Grade("wrong", answer, "timeout")
    except Exception as error:  # whatever an answer makes the library raise, it is not shown to be right
        return Grade("wrong", answer, f"error: {type(error).__name__}")


def _limit_memory(memory_gib: float) -> None:
    import resource
    import signal

    limit = int(memory_gib * _GIBIBYTE)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Ctrl-C is for the run: it ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
