"""Mathematical answers: processes compare the last box of the text, or the answer that `extract` finds, with the gold answer.

The rules are in `dflash_mcmc.grading.math.comparing`. Words, choices, bases, numbers, units, lists, tuples, intervals,
matrices and equations have one rule each; math-verify decides the rest. No answer is accepted because a rule failed.
"""

from dataclasses import dataclass
from typing import Any

from dflash_mcmc.components import identity, register, runtime
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import VERSION, AnswerGrader, extraction, verdicts


@register("grader", "math")
@dataclass(slots=True, kw_only=True)
class MathGrader(AnswerGrader):
    """Compares the last balanced box with the gold answer, by typed rules and then by math-verify."""

    version = VERSION
    sources = auto = tuple(extraction.RULES)

    extract: Any = identity("boxed", "how the answer is found: boxed, hashes (#### 12), answer_is, last_number, a list of "
                            "them in order of preference, or auto for all of them in this order")

    timeout_seconds: float = identity(8.0, "limit on processor time; an answer that takes longer has the verdict timeout",
                                      gt=0)
    memory_gib: float = runtime(4.0, "memory of a grading process, in GiB", ge=1, le=1024)
    num_workers: int = runtime(1, "number of grading processes", ge=1, le=256)

    def check_gold(self, gold: str) -> None:
        if "####" in gold:  # GSM8K's own column
            raise ConfigError("answer", gold, "the final answer alone, and no worked solution; or dataset=gsm8k "
                              "dataset.path=FILE dataset.check_rows=false, which reads what follows ####")

    def start(self) -> verdicts.GradingPool:
        from dflash_mcmc.grading.math.pool import MathPool

        return MathPool(self.timeout_seconds, self.memory_gib, self.num_workers, extraction=self.extraction())
