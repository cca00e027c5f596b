"""The pool that asks a judge: requests run in threads, in parallel with the run."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dflash_mcmc.grading.extraction import after_thinking
from dflash_mcmc.grading.judge.endpoint import Endpoint, Failed
from dflash_mcmc.grading.judge.rubrics import Unreadable, rubrics_of, satisfied
from dflash_mcmc.grading.verdicts import CORRECT, ERROR, NO_ANSWER, TIMEOUT, WRONG, timed
from dflash_mcmc.types import Grade

_MAX_LISTED = 20


class JudgePool:
    """Grades texts by a judge, `num_workers` at a time. Call `submit`; `finished` then yields the grades that are ready.

    A judge that does not reply, or replies without a decision on every rubric, gives the verdict `timeout` or `error`.
    """

    def __init__(self, endpoint: Endpoint, template: Any, num_workers: int):
        self._endpoint, self._template = endpoint, template
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._closed = threading.Event()
        self._futures: dict[Future[tuple[Grade, float]], Hashable] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Submits a text. Raises UserError for a gold answer without rubrics."""
        rubrics, answer = rubrics_of(gold), after_thinking(text)
        if answer is None or not answer.strip():
            rule = "unfinished_thinking" if answer is None else "empty"
            self._decided.append((tag, Grade(NO_ANSWER, None, rule)))
        else:
            self._futures[self._threads.submit(timed, self._graded, answer.strip(), rubrics)] = tag

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) for the texts that are decided; with `wait`, waits for all that were submitted.

        Raises UserError if the endpoint refuses the requests.
        """
        while self._decided:
            yield self._decided.pop()
        for future in [future for future in self._futures if wait or future.done()]:
            tag = self._futures.pop(future)
            grade, seconds = future.result()
            yield tag, grade._replace(grade_seconds=seconds)

    def close(self) -> None:
        """Drops the requests that wait. A request under way ends with its reply or its time limit."""
        self._closed.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _graded(self, response: str, rubrics: list[str]) -> Grade:
        question = self._template.render(response=response, rubrics=rubrics)
        reason = ""
        for _ in range(self._endpoint.retries + 1):
            try:
                decisions = satisfied(self._endpoint.ask(question, self._closed), len(rubrics))
            except Failed as error:
                return Grade(TIMEOUT if error.timed_out else ERROR, None, "endpoint", str(error))
            except Unreadable as error:
                reason = str(error)
            else:
                return _grade(decisions)
        return Grade(ERROR, None, "reply", reason)


def _grade(decisions: list[bool]) -> Grade:
    failed = [str(number) for number, decision in enumerate(decisions, start=1) if not decision]
    more = ", ..." if len(failed) > _MAX_LISTED else ""
    reason = f"not satisfied: {', '.join(failed[:_MAX_LISTED])}{more} of {len(decisions)}" if failed else ""
    return Grade(WRONG if failed else CORRECT, None, "rubrics", reason)
