"""The pool that grades programs: each one runs in its own sandbox, in parallel with the run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from dflash_mcmc.errors import UserError, note
from dflash_mcmc.grading.code.programs import program_of, with_tests
from dflash_mcmc.grading.code.sandbox import WALLS, CannotRun, Ended, Limits, Sandbox, find_sandbox
from dflash_mcmc.grading.code.tests_of import task_of
from dflash_mcmc.grading.extraction import after_thinking
from dflash_mcmc.grading.verdicts import CORRECT, ERROR, MAX_DEATHS, NO_ANSWER, TIMEOUT, UNGRADABLE, UNSUPPORTED, WRONG, timed
from dflash_mcmc.types import Grade

_MAX_LENGTH = 100_000
"""The largest number of characters in a program. No real solution is that long."""
_MAX_TEXT = 1_000_000
"""The largest number of characters in a text after the thinking. The run's own process searches this text for the program."""
_NEEDED = ("user", "limits", "network", "processes")
_OUTCOMES = {"tests": CORRECT, "timeout": TIMEOUT, "killed": ERROR, "lost": UNGRADABLE}


class ProgramPool:
    """Grades programs by their tests. Call `submit`; `finished` then yields the grades that are ready.

    Limits per program are `timeout_seconds` of wall clock and `memory_gib` GiB per process. The constructor raises UserError
    if this machine cannot run programs in a sandbox, or if `all_walls` is true and a wall in `_NEEDED` does not work.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, all_walls: bool):
        self._limits = Limits(timeout_seconds, memory_gib, num_workers)
        self._sandbox, self.walls = _sandbox(all_walls)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._futures: dict[Future, tuple[Hashable, str]] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str, question: str = "") -> None:
        """Submits a text. Raises UserError unless `gold` is a JSON object with tests (see `grading.code.programs`)."""
        task, answer = task_of(gold), after_thinking(text)
        too_long = answer is not None and len(answer) > _MAX_TEXT
        program = None if too_long else program_of(text, task)
        if too_long or (program is not None and len(program) > _MAX_LENGTH):
            self._decided.append((tag, Grade(UNSUPPORTED, None, "length", walls=self.walls)))
        elif program is None:
            rule = "unfinished_thinking" if answer is None else "empty"
            self._decided.append((tag, Grade(NO_ANSWER, None, rule, walls=self.walls)))
        else:
            tested = with_tests(program, task)
            future = self._threads.submit(timed, _run, self._sandbox, tested, task.entry_point, self._limits)
            self._futures[future] = tag, program

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) for the texts that are decided; with `wait`, waits for all that were submitted.

        Raises UserError if the sandbox has stopped working.
        """
        for future in [future for future in self._futures if wait or future.done()]:
            self._settle(future)
            yield self._decided.pop()
        while self._decided:
            yield self._decided.pop()

    def close(self) -> None:
        """Waits for the running programs, which have a time limit, and cancels the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _settle(self, future: Future) -> None:
        tag, program = self._futures.pop(future)
        try:
            ended, seconds = future.result()
        except CannotRun as error:
            raise UserError(f"grader: programs can no longer be run: {error}; start the run again") from error
        outcome = _OUTCOMES.get(ended.word, WRONG)
        grade = Grade(outcome, program, ended.word, ended.detail, walls=self.walls, grade_seconds=seconds)
        self._decided.append((tag, grade))


def _run(sandbox: Sandbox, program: str, entry_point: str, limits: Limits) -> Ended:
    for _ in range(MAX_DEATHS):
        try:
            ended = sandbox.run(program, entry_point, limits)
        except CannotRun:  # the machine may have been out of processes or namespaces for a moment
            ended = sandbox.run(program, entry_point, limits)
        if ended.word != "lost":
            break
    return ended


def _sandbox(all_walls: bool) -> tuple[Sandbox, tuple[str, ...]]:
    try:
        sandbox, walls = find_sandbox()
    except (CannotRun, OSError, AttributeError) as error:  # AttributeError: not Linux
        raise UserError(f"grader=code: programs cannot be run on this machine: {error or type(error).__name__}") from error
    missing = [wall for wall in _NEEDED if wall not in walls]
    if missing and all_walls:
        raise UserError(f"grader.walls: given 'required', but this machine does not support the walls {', '.join(missing)}; "
                        "allowed here: 'available', which runs the model's programs without them")
    without = [wall for wall in WALLS if wall not in walls]
    note(f"grader=code runs programs that the model has written, inside the walls {', '.join(walls) or 'none'}"
         + (f"; not available here: {', '.join(without)}" if without else ""))
    return sandbox, walls
