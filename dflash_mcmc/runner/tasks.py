"""The tasks of a run: samples, or the units of a probe. The loop (`loop.py`) treats both through `Tasks` and `Worker`,
and returns a `RunResult`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dflash_mcmc.chains.cost import CostEstimate
from dflash_mcmc.store.files import Schema
from dflash_mcmc.store.records import ProblemText, SampleKey

R = TypeVar("R", bound=Mapping)
"""The type of the records: JSON values, with `problem` and `chain`."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results that follow from all records of a run."""

    summary: dict[str, object]
    """The content of `summary.json`."""
    metrics: dict[str, object]
    """The summary values that the tracker logs."""
    tables: dict[str, list[dict]]
    """The tables that the tracker logs, by name."""

    def write(self, folder: Path) -> list[Path]:
        """Writes tables and figures into the run folder. Returns the paths of the figures."""
        return []


class Worker(ABC, Generic[R]):
    """Does tasks, and holds everything that they need."""

    @abstractmethod
    def do(self, keys: Sequence[SampleKey], claimed: Iterable[SampleKey]) -> Generator[R | None, None, None]:
        """Does the claimed tasks and yields the record of each when it is done, in any order.

        A UserError that refuses the configuration is raised before the first yield. An implementation that has nothing more
        to refuse may yield None at once.

        Args:
            keys: all keys that `claimed` can give.
            claimed: an iterator. Each step claims a task and marks it as begun. The worker takes a step only when it has
                room for another task.
        """

    def ready(self) -> Iterator[R]:
        """Records that are done and that `do` has not yielded yet. The loop asks for them after an interruption."""
        return iter(())

    def counters(self) -> dict[str, object]:
        """Counts of this worker's work, for `run.json`."""
        return {}

    def close(self) -> None:
        """Releases what the worker holds."""


class Tasks(ABC, Generic[R]):
    """All tasks that a configuration requests."""

    unit: str
    """The word for one task."""
    not_in_memory: tuple[str, ...] = ()
    """Large fields of records that are not kept in memory."""

    @abstractmethod
    def schema(self) -> Schema:
        """The schema of the records, which is checked when they are written and read."""

    @abstractmethod
    def keys(self) -> Sequence[SampleKey]:
        """The keys of all requested tasks, in the order of the reports. Loads no model. Raises UserError."""

    @abstractmethod
    def prepare(self, pending: Sequence[SampleKey], device: str) -> Worker[R]:
        """Loads what the pending tasks need. Raises UserError."""

    @abstractmethod
    def metrics(self, record: R) -> Mapping[str, float | None]:
        """The numbers of a record that the tracker logs."""

    @abstractmethod
    def summarise(self, records: Sequence[R]) -> Results:
        """The results of a complete run, from its records only."""

    @abstractmethod
    def table(self, folders: Sequence[Path]) -> str:
        """The table that a command prints at its end, for all folders of complete runs of this kind."""

    @abstractmethod
    def estimate(self) -> CostEstimate:
        """The expected cost. Loads no model."""

    @abstractmethod
    def assumptions(self) -> list[str]:
        """The lines that explain the numbers of `estimate`."""

    @abstractmethod
    def warning(self, records: Sequence[R], folder: Path) -> str | None:
        """A line about tasks of the run in this folder that failed, and what helps; None if there are none."""

    def notes(self) -> dict[str, object]:
        """Values that describe this start of the run in `run.json`."""
        return {}

    def missing_problems(self, known: Collection[str]) -> Iterable[ProblemText]:
        """The problems of the tasks except those with known ids. The loop asks for them after `prepare`."""
        return ()

    def progress(self, fresh: Sequence[R]) -> str:
        """Text after the progress bar. `fresh` holds the records that were added since the last call."""
        return ""
