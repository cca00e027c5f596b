"""Graders: they turn a text and a gold answer into a verdict."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dflash_mcmc.components import Component

if TYPE_CHECKING:
    from dflash_mcmc.config.schema import Config
    from dflash_mcmc.types import Grade


class GradingPool(Protocol):
    """Grades texts while the run continues."""

    def submit(self, tag: Any, text: str, gold: str) -> None:
        """Hands over a text. Raises UserError for a gold answer that no text can be compared with."""

    def finished(self, wait: bool = False) -> Iterator[tuple[Any, Grade]]:
        """Yields (tag, grade) of each graded text. With `wait` it waits until all submitted texts are graded."""

    def close(self) -> None:
        """Ends the pool's processes."""


class Grader(Component):
    """Base class of graders. A leaf needs `start`."""

    __slots__ = ()

    group = "grader"
    version: ClassVar[int | None] = None
    """Version of the grader's rules, as part of the identity: records of another version are not continued."""
    runs_answers: ClassVar[bool] = False
    """Whether an answer is a program that is run, instead of a value that is compared."""

    @abstractmethod
    def start(self) -> GradingPool:
        """The running pool. Raises UserError if nothing can be graded as configured."""

    def check_gold(self, gold: str) -> None:
        """Raises UserError for a gold answer that no text can be compared with."""

    def canonical(self, config: Config) -> dict[str, object]:
        """The version of the rules."""
        return {} if self.version is None else {"version": self.version}
