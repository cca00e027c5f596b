"""The pool that runs programs: texts go in, grades come out, each program in a sandbox of its own beside the run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from dflash_mcmc.errors import UserError, note
from dflash_mcmc.grading.code.programs import program_of, task_of, with_tests
from dflash_mcmc.grading.code.sandbox import WALLS, CannotRun, Ended, Limits, Sandbox, find_sandbox
from dflash_mcmc.grading.extraction import behind_thinking
from dflash_mcmc.grading.verdicts import CORRECT, ERROR, NO_ANSWER, TIMEOUT, UNSUPPORTED, WRONG
from dflash_mcmc.types import Grade

_MAX_LENGTH = 100_000
"""Characters of a program; no function is that long."""
_MAX_TEXT = 1_000_000
"""Characters of a text behind its thinking. It is searched for the program in the run's own process."""
_NEEDED = ("user", "limits", "network", "processes")
_OUTCOMES = {"tests": CORRECT, "timeout": TIMEOUT, "killed": ERROR}


class _SubmittedProgram(NamedTuple):
    tag: Hashable
    program: str


class ProgramPool:
    """Grades programs by their tests. `submit`, then `finished` yields what has been decided.

    Raises UserError at once where programs cannot be run here, or not behind walls of network and processes while
    `all_walls` asks for them.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, all_walls: bool):
        self._limits = Limits(timeout_seconds, memory_gib, num_workers)
        self._sandbox, self.walls = _sandbox(all_walls)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._futures: dict[Future, _SubmittedProgram] = {}
        self._decided: list[tuple[Hashable, Grade]] = []

    def submit(self, tag: Hashable, text: str, gold: str) -> None:
        """Hands over a text; `gold` is JSON (`grading.programs`). Raises UserError for another gold answer."""
        task, answer = task_of(gold), behind_thinking(text)
        too_long = answer is not None and len(answer) > _MAX_TEXT
        program = None if too_long else program_of(text, task)
        if program is None and not too_long:
            rule = "unfinished_thinking" if answer is None else "empty"
            self._decided.append((tag, Grade(NO_ANSWER, None, rule, walls=self.walls)))
        elif too_long or len(program) > _MAX_LENGTH:
            self._decided.append((tag, Grade(UNSUPPORTED, None, "length", walls=self.walls)))
        else:
            future = self._threads.submit(_run, self._sandbox, with_tests(program, task), task.entry_point, self._limits)
            self._futures[future] = _SubmittedProgram(tag, program)

    def finished(self, wait: bool = False) -> Iterator[tuple[Hashable, Grade]]:
        """Yields (tag, grade) of all that has been decided; with `wait`, of all that was submitted. Raises UserError."""
        for future in [future for future in self._futures if wait or future.done()]:
            self._settle(future)
            yield self._decided.pop()
        while self._decided:
            yield self._decided.pop()

    def close(self) -> None:
        """Waits for the programs that run, within their time; gives up the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _settle(self, future: Future) -> None:
        submitted = self._futures.pop(future)
        try:
            ended = future.result()
        except CannotRun as error:
            raise UserError(f"grader: programs cannot be run any more: {error}; start the run again") from error
        outcome = _OUTCOMES.get(ended.word, WRONG)
        self._decided.append((submitted.tag, Grade(outcome, submitted.program, ended.word, ended.detail, walls=self.walls)))


def _run(sandbox: Sandbox, program: str, entry_point: str, limits: Limits) -> Ended:
    try:
        return sandbox.run(program, entry_point, limits)
    except CannotRun:  # the machine was out of processes or namespaces for a moment
        return sandbox.run(program, entry_point, limits)


def _sandbox(all_walls: bool) -> tuple[Sandbox, tuple[str, ...]]:
    try:
        sandbox, walls = find_sandbox()
    except (CannotRun, OSError, AttributeError) as error:  # AttributeError: not Linux
        raise UserError(f"grader=code: programs cannot be run on this machine: {error or type(error).__name__}") from error
    missing = [wall for wall in _NEEDED if wall not in walls]
    if missing and all_walls:
        raise UserError(f"grader.walls: given 'required', but this machine has not the walls {', '.join(missing)}; allowed "
                        "here: 'available', which runs what the model has written without them")
    without = [wall for wall in WALLS if wall not in walls]
    note(f"grader=code runs what the model has written, behind the walls {', '.join(walls) or 'none'}"
         + (f"; without {', '.join(without)}" if without else ""))
    return sandbox, walls
