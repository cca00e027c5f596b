"""An oracle: whether the grader finds an answer correct. It bounds what any evidence could do, and is no method."""

from dataclasses import dataclass

from dflash_mcmc.components import Settings, register
from dflash_mcmc.grading.verdicts import CORRECT
from dflash_mcmc.potential import Evaluator, Factor
from dflash_mcmc.types import Problem


@register("potential", "verdict")
@dataclass(slots=True, kw_only=True)
class VerdictPotential(Factor):
    """An oracle that reads the gold answer: r is 1 for an answer that the grader finds correct, else 0. For bounds only."""

    bounds = (0.0, 1.0)

    def start(self, config: Settings) -> Evaluator:
        pool = config.grader.start()

        def rate(problem: Problem, text: str) -> float:
            pool.submit(0, text, problem.answer, problem.question)
            [(_, grade)] = pool.finished(wait=True)
            return float(grade.verdict == CORRECT)

        return Evaluator(rate, self.on_failure, close=pool.close)
