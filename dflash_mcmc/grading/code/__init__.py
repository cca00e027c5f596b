"""Programs: the program in the text is run with the tests of the problem, in a sandbox, in parallel with the run.

The gold answer is JSON with the tests of HumanEval or MBPP (`dflash_mcmc.grading.code.programs`). A program passes if its
tests run to their end. They run in another process, which calls the functions of the program and gets copies of their results:
a program finds no expected output, and no object of its own decides a comparison. The sandbox has limits: a program can leave
it through a bug of the kernel.

A program also runs on the examples of its question, where that is asked for. They run as tests do, in a process that the
program cannot read: what a program prints or raises is no verdict. What a program returns is the hash that its run raises. A
program can lie about that, and then votes for its lie.
"""

import ast
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dflash_mcmc.components import Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError, UserError, note
from dflash_mcmc.grading import VERSION, Grader, extraction, verdicts
from dflash_mcmc.grading.code.programs import program_of, task_of, with_tests
from dflash_mcmc.grading.code.sandbox import WALLS, CannotRun, Ended, Limits, Sandbox, find_sandbox
from dflash_mcmc.types import Example, Grade

_MAX_LENGTH = 100_000
"""The largest number of characters in a program. No real solution is that long."""
_MAX_TEXT = 1_000_000
"""The largest number of characters in a text after the thinking. The run's own process searches this text for the program."""
_NEEDED = ("user", "limits", "network", "processes")
_OUTCOMES = {"tests": verdicts.CORRECT, "timeout": verdicts.TIMEOUT, "killed": verdicts.ERROR, "lost": verdicts.UNGRADABLE}
_MOST_CALLS = 24
_RETURNED = "returned_"
_HARNESS = """
def _texts(calls):
    def text(value):
        return f"{type(value).__name__}{sorted(map(repr, value))}" if isinstance(value, (set, frozenset)) else repr(value)
    for call in calls:
        try:
            yield text(eval(call, dict(globals())))
        except Exception as error:
            yield "!" + type(error).__name__
import hashlib as _hashlib
_returned = list(_texts({calls!r}))
if not all(_text.startswith("!") for _text in _returned):
    raise type("{name}" + _hashlib.sha256(repr(_returned).encode("utf-8", "replace")).hexdigest()[:32], (BaseException,), {{}})
"""


@register("grader", "code")
@dataclass(slots=True, kw_only=True)
class CodeGrader(Grader):
    """Runs the program in the text with the tests of the problem, in a sandbox; opt-in, Linux only."""

    version = VERSION
    runs_answers = True

    allow_execution: bool = runtime(False, "whether programs that a model has written may be run here")
    timeout_seconds: float = identity(3.0, "wall-clock limit of a program; a program that takes longer has the verdict "
                                      "timeout", gt=0)
    memory_gib: float = identity(1.0, "address space of each process of a program, in GiB", ge=0.125, le=1024)
    walls: Literal["required", "available"] = runtime(
        "required", "required: refuses a machine that cannot isolate a program from the network, other processes and the "
        "user's rights; available: uses the walls of the sandbox that the machine supports")
    examples: bool = identity(False, "whether each program is also run on the examples that its question shows: records then "
                              "have the share that it passes and what it returns, for aggregate=examples", later=True)
    num_workers: int = runtime(1, "number of programs that run at once; more than the free cores cause time-outs", ge=1,
                               le=256)

    def check(self, config: Settings) -> None:
        if not self.allow_execution:
            raise ConfigError("grader.allow_execution", False, "true, which runs the programs that the model writes on this "
                              "machine, in a sandbox; without it grader=code cannot grade")

    def check_gold(self, gold: str) -> None:
        task_of(gold)

    def start(self) -> "ProgramPool":
        return ProgramPool(self.timeout_seconds, self.memory_gib, self.num_workers, self.walls == "required",
                           self.examples)


class ProgramPool(verdicts.GradesInThreads):
    """Grades programs by their tests. Call `submit`; `finished` then yields the grades that are ready.

    `finished` raises UserError if the sandbox has stopped working.

    Limits per program are `timeout_seconds` of wall clock and `memory_gib` GiB per process. The constructor raises UserError
    if this machine cannot run programs in a sandbox, or if `all_walls` is true and a wall in `_NEEDED` does not work.
    """

    def __init__(self, timeout_seconds: float, memory_gib: float, num_workers: int, all_walls: bool,
                 examples: bool = False):
        self._examples = examples
        self._limits = Limits(timeout_seconds, memory_gib, num_workers)
        self._sandbox, self.walls = _sandbox(all_walls)
        super().__init__(num_workers)
        self._stop = os.eventfd(0)

    def submit(self, tag: Hashable, text: str, gold: str, question: str = "") -> None:
        """Submits a text. Raises UserError unless `gold` is a JSON object with tests (see `grading.code.programs`)."""
        task, answer = task_of(gold), extraction.after_thinking(text)
        too_long = answer is not None and len(answer) > _MAX_TEXT
        program = None if too_long else program_of(text, task)
        if too_long or (program is not None and len(program) > _MAX_LENGTH):
            self.decided(tag, Grade(verdicts.UNSUPPORTED, None, "length", walls=self.walls))
        elif program is None:
            rule = "unfinished_thinking" if answer is None else "empty"
            self.decided(tag, Grade(verdicts.NO_ANSWER, None, rule, walls=self.walls))
        else:
            scripts = with_tests(program, task)
            shown = extraction.examples_in(question, task.entry_point) if self._examples else ()
            self.decide(tag, self._graded, program, scripts, task.entry_point, shown)

    def passed(self, text: str, gold: str, question: str) -> float:
        """The share of the question's examples that the program in a text passes; 0 without a program or examples."""
        task = task_of(gold)
        program = program_of(text[:_MAX_TEXT], task)
        if program is None or len(program) > _MAX_LENGTH:
            return 0.0
        run = partial(_run, self._sandbox, entry_point=task.entry_point, limits=self._limits, stop=self._stop)
        return share_passed(run, program, extraction.examples_in(question, task.entry_point)) or 0.0

    def close(self) -> None:
        """Ends the running programs and cancels the others."""
        os.eventfd_write(self._stop, 1)
        super().close()
        os.close(self._stop)

    def _graded(self, program: str, scripts: tuple[str, str], entry_point: str, examples: Sequence[Example]) -> Grade:
        """The grade of a program, and what it does on examples. Raises UserError if the sandbox has stopped working."""
        run = partial(_run, self._sandbox, entry_point=entry_point, limits=self._limits, stop=self._stop)
        try:
            ended, seconds = verdicts.timed(run, *scripts)
            return Grade(_OUTCOMES.get(ended.word, verdicts.WRONG), program, ended.word, ended.detail, walls=self.walls,
                         grade_seconds=seconds, passed=share_passed(run, program, examples),
                         behaviour=behaviour(run, program, examples))
        except CannotRun as error:
            raise UserError(f"grader: programs can no longer be run: {error}; start the run again") from error


def _run(sandbox: Sandbox, program: str, tests: str = "", *, entry_point: str, limits: Limits, stop: int) -> Ended:
    for _ in range(verdicts.MAX_DEATHS):
        try:
            ended = sandbox.run(program, entry_point, limits, tests, stop)
        except CannotRun:  # the machine may have been out of processes or namespaces for a moment
            ended = sandbox.run(program, entry_point, limits, tests, stop)
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


def share_passed(run: Callable[..., Ended], program: str, examples: Sequence[Example]) -> float | None:
    """The share of the examples that a program passes; None if no example has a known result.

    Args:
        run: runs a program, and tests of it, in the sandbox.
    """
    checks = [example.check for example in examples if example.check]
    if not checks:
        return None
    if run(program, tests="\n".join(checks)).passed:
        return 1.0
    return sum(run(program, tests=check).passed for check in checks) / len(checks) if len(checks) > 1 else 0.0


def behaviour(run: Callable[[str], Ended], program: str, examples: Sequence[Example]) -> str | None:
    """A hash of what a program returns on `calls_of`; None if it does not end, or raises on every call."""
    calls = calls_of(examples)
    if not calls:
        return None
    harness = _HARNESS.replace("{calls!r}", repr(calls)).replace("{name}", _RETURNED).replace("{{}}", "{}")
    name = run(f"{program}\n{harness}").detail
    return name.removeprefix(_RETURNED) if name.startswith(_RETURNED) else None


def calls_of(examples: Sequence[Example]) -> list[str]:
    """The calls of the examples, and the same with one argument changed: at most 24."""
    calls = [example.call for example in examples if example.call]
    return list(dict.fromkeys([*calls, *(changed for call in calls for changed in _changed(call))]))[:_MOST_CALLS]


def _changed(call: str) -> Iterator[str]:
    parsed = ast.parse(call, mode="eval").body
    for place, argument in enumerate(parsed.args):  # type: ignore[attr-defined]  # `Example.call` is a call
        for value in _values(ast.literal_eval(argument)):
            parsed.args[place] = ast.parse(repr(value), mode="eval").body  # type: ignore[attr-defined]
            yield ast.unparse(parsed)
        parsed.args[place] = argument  # type: ignore[attr-defined]


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value - 1, -value)
    elif isinstance(value, (str, list, tuple)):
        yield from (value[:0], value[::-1], value * 2, value[:-1])
