"""Grading: graders turn a text and a gold answer into a verdict, by rules, programs or a model, isolated from the run.

A component holds the settings (`grader=math`). `math/comparing` has the rules for mathematical answers and `math/pool` the
processes that apply them; `code/programs` and `code/sandbox` run programs; `choice` reads multiple-choice answers.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dflash_mcmc.components import MISSING, Component, Settings, identity, name_of
from dflash_mcmc.errors import ConfigError
from dflash_mcmc.grading import extraction, verdicts
from dflash_mcmc.process import stopping
from dflash_mcmc.types import Grade, Problem

VERSION = 8
"""Version of the rules. Increase it with every change of a rule: a run with grades of another version is not continued, and
each record states the version of its grade."""


def settled(pool: verdicts.GradingPool, wait: bool = False) -> Iterator[tuple[Any, Grade]]:
    """What `pool.finished` yields, without what is no grade: a signal to every process of a job also ends those that grade."""
    for tag, grade in pool.finished(wait):
        if not (stopping.requested() and grade.verdict in (verdicts.ERROR, verdicts.TIMEOUT, verdicts.UNGRADABLE)):
            yield tag, grade


class Grader(Component):
    """Base class of graders. A subclass defines `start`."""

    __slots__ = ()

    group = "grader"
    version: ClassVar[int | None] = None
    """Version of the grader's rules, as part of the identity: records of another version are not continued."""
    runs_answers: ClassVar[bool] = False
    """Whether an answer is a program that is run, instead of a value that is compared."""
    examples: bool = False
    """Whether a program is also run on the examples of its question."""
    judges: ClassVar[bool] = False
    """Whether a language model judges the text by rubrics."""

    @abstractmethod
    def start(self) -> verdicts.GradingPool:
        """The running pool. Raises UserError if nothing can be graded as configured."""

    def preflight(self) -> None:
        """Checks the services that the grader calls, before weights are loaded. Raises UserError."""

    def check_gold(self, gold: str) -> None:
        """Raises UserError for a gold answer that no text can be compared with."""

    def canonical(self, config: Settings) -> dict[str, object]:
        """The version of the rules."""
        return {} if self.version is None else {"version": self.version}


@dataclass(slots=True, kw_only=True)
class AnswerGrader(Grader):
    """Base class of graders that find a final answer in the text.

    A subclass declares the field `extract`, and sets `sources` and `auto`.
    """

    sources: ClassVar[tuple[str, ...]] = ()
    """The extraction rules that the grader knows."""
    auto: ClassVar[tuple[str, ...]] = ()
    """The extraction rules that `auto` applies, in order."""

    extract: Any = identity(MISSING, "how the answer is found in the text")
    until: list[str] = identity([], "texts that end the answer, such as '\\nQuestion:' where a base model invents a next "
                                "question (\\n is a line feed)")

    def check(self, config: Settings) -> None:
        extraction.rules_of(self.extract, self.sources, self.auto)
        if not all(self.until):  # an empty text would end every answer at its start
            raise ConfigError("grader.until", list(self.until), r"texts that are not empty, such as ['\nQuestion:']")

    def resolved(self, config: Settings) -> "AnswerGrader":
        """The grader with its extraction rules in their normal form."""
        return replace(self, extract=extraction.normal(self.extract))

    def extraction(self) -> extraction.Extraction:
        """How the answer is found."""
        rules = extraction.rules_of(self.extract, self.sources, self.auto)
        return extraction.Extraction(rules, tuple(text.replace(r"\n", "\n") for text in self.until))


def label(grader: Grader) -> str:
    """Name and version of a grader component as records store them, e.g. `math 2`; only the name if it has no version."""
    return name_of(grader) if grader.version is None else f"{name_of(grader)} {grader.version}"


def check_golds(grader: Grader, problems: Iterable[Problem]) -> None:
    """Checks the gold answers before sampling starts. Raises UserError if this grader cannot compare with one of them."""
    for problem in problems:
        grader.check_gold(problem.answer)
