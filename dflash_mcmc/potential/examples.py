"""Programs: the share of the examples of its question that a program passes, in the sandbox of the grader."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mcmc.components import Need, Settings, register
from dflash_mcmc.potential import Evaluator, Factor
from dflash_mcmc.types import Problem


@register("potential", "examples")
@dataclass(slots=True, kw_only=True)
class ExamplesPotential(Factor):
    """r is the share of the question's examples that the program passes, from 0 to 1; 0 for a question without examples.

    No hidden test is run. The program runs in the sandbox of `grader=code`, with its limits.
    """

    bounds = (0.0, 1.0)
    needs = (*Factor.needs, Need("grader.runs_answers"))

    def start(self, config: Settings) -> Evaluator:
        pool: Any = config.grader.start()  # of programs, as `check` has made sure
        return Evaluator(lambda problem, text: pool.passed(text, problem.answer, problem.question), self.on_failure,
                         close=pool.close)

    def remarks(self, problems: Sequence[Problem]) -> list[str]:
        """As of every potential, and how many questions have no examples."""
        without = sum(not any(example.check for example in problem.examples) for problem in problems)
        return [*super().remarks(problems), *([f"potential=examples: {without} of {len(problems)} questions have no "
                                                    "examples; r is 0 for their answers"] if without else [])]
