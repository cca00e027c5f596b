"""Programs: the program in the text is run with the tests of the problem, in a sandbox.

The gold answer is JSON with the tests of HumanEval or MBPP (`dflash_mcmc.grading.code.programs`). A program passes if its
tests run to their end. They run in another process, which calls the functions of the program and gets copies of their results:
a program finds no expected output, and no object of its own decides a comparison.

The sandbox has limits: a program can leave it through a bug of the kernel.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dflash_mcmc.components import Settings, identity, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import VERSION, Grader

if TYPE_CHECKING:
    from dflash_mcmc.grading.code.pool import ProgramPool


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
        from dflash_mcmc.grading.code.programs import task_of

        task_of(gold)

    def start(self) -> "ProgramPool":
        from dflash_mcmc.grading.code.pool import ProgramPool

        return ProgramPool(self.timeout_seconds, self.memory_gib, self.num_workers, self.walls == "required",
                           self.examples)
