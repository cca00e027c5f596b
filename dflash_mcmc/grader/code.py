"""Code: the program that a text holds is run with the problem's tests, in a sandbox.

The gold answer is JSON with `prompt`, `test` and `entry_point` (`dflash_mcmc.grading.code.programs`), as dataset=humaneval
makes it. A program passes if its tests run to their end: the harness then returns a random word that it was given.

The sandbox is no prison. The tests run in the program's own process, as in HumanEval's harness (Chen et al. 2021, arXiv
2107.03374), so that a program can cheat: by an object that equals everything, or by finding the word on the stack. A fault of
the kernel is a way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_mcmc.errors import ConfigError
from dflash_mcmc.fields import identity, runtime
from dflash_mcmc.grader import Grader
from dflash_mcmc.grading import VERSION
from dflash_mcmc.registry import register

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.grading.code.pool import ProgramPool


@register("grader", "code")
@dataclass(slots=True, kw_only=True)
class CodeGrader(Grader):
    """The program in the text is run with the problem's tests, behind walls; opt-in, Linux only."""

    version = VERSION
    runs_answers = True

    allow_execution: bool = runtime("whether programs that a model has written may be run here")
    timeout_seconds: float = identity("wall clock of a program; one that takes longer is wrong: timeout", gt=0)
    memory_gib: float = identity("address space of each process of a program, in GiB", ge=0.125, le=1024)
    walls: str = runtime("required: refuses a machine that does not shut a program off from network, other processes "
                         "and the user's rights; available: runs it behind the walls that the machine has",
                         choices=("required", "available"))
    num_workers: int = runtime("number of programs that run at once; more than the free cores cause time-outs", ge=1)

    def check(self, config: Config) -> None:
        """Checks that running the model's programs is allowed. Raises ConfigError."""
        if not self.allow_execution:
            raise ConfigError("grader.allow_execution", False, "true, which runs the programs that the model writes on this "
                              "machine, behind walls; without it grader=code grades nothing")

    def check_gold(self, gold: str) -> None:
        """Raises UserError for a gold answer without tests."""
        from dflash_mcmc.grading.code.programs import task_of

        task_of(gold)

    def start(self) -> ProgramPool:
        """The running pool. Raises UserError where programs cannot be run as asked for."""
        from dflash_mcmc.grading.code.pool import ProgramPool

        return ProgramPool(self.timeout_seconds, self.memory_gib, self.num_workers, self.walls == "required")
