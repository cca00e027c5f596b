"""Trackers: where metrics are shown. A failing tracker never stops a run: the run folder has everything."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.components import Component, name_of
from dflash_mcmc.errors import reason_of, tell
from dflash_mcmc.store.records import read_problems


class RunInfo(NamedTuple):
    """A run, as its tracker sees it at the start."""

    identity: str
    """Twelve hexadecimal digits. They stay the same when the run is continued."""
    experiment: str
    condition: str
    config: dict
    folder: Path
    name: str = ""
    """Name for people: the condition and the overrides that distinguish the run. If it is empty, the condition is shown."""
    tags: tuple[str, ...] = ()
    """Tags of the form `group=component`."""


SAMPLE_COLUMNS = ("problem", "chain", "level", "subject", "verdict", "correct", "answer", "gold", "num_tokens", "log_p",
                  "proposals", "accepted", "acceptance", "moved", "seconds", "finish_reason", "question", "prompt", "text")


def sample_rows(records: Sequence[dict], folder: Path) -> list[dict]:
    """The table of all samples of a run, with `SAMPLE_COLUMNS`. Empty for a probe.

    Question and prompt are in the first row of each problem alone: with many chains they would be most of the table.
    """
    problems, rows = dict(read_problems(folder)), []
    for record in (each for each in records if "verdict" in each):
        acceptance = record["accepted"] / record["proposals"] if record.get("proposals") else None
        row = {**problems.pop(record["problem"], {}), **record, "correct": record["verdict"] == "correct",
               "acceptance": acceptance}
        rows.append({name: row.get(name) for name in SAMPLE_COLUMNS})
    return rows


class TrackedRun:
    """A run that a tracker shows. Several starts of a run have the same `info.identity`, and their metrics belong together.

    Every method does nothing unless a tracker defines it.
    """

    def log(self, metrics: dict, step: int) -> None:
        """Logs a record's metrics. `step` is the number of records that the run has so far. It increases with each call."""

    def summary(self, metrics: dict, records: list[dict]) -> None:
        """Logs the summary, once all samples are recorded and the run's folder is written."""

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        """Logs tables and PNG figures of the run folder, after the summary. The rows of a table have the same keys."""

    def preempt(self) -> None:
        """Notes that the run was asked to end, by SLURM for example, and will continue."""

    def finish(self, exit_code: int) -> None:
        """Closes the run. This is the last call. `exit_code` is 1 for a run that is not complete."""


class Tracker(Component):
    """Base class of trackers. A subclass must define `start`."""

    __slots__ = ()

    group = "tracker"

    @abstractmethod
    def start(self, info: RunInfo) -> TrackedRun:
        """Opens the run, or continues it."""

    def key(self) -> str:
        """Key under which the run folder notes how much was logged. Tracker runs that share no data have different keys."""
        return name_of(self)


class Guarded:
    """A started tracker that prints its first failure and is then switched off."""

    def __init__(self, tracker: Tracker, info: RunInfo):
        self._run: TrackedRun | None = None
        self._name = type(tracker).__name__
        self.works = True
        """Whether nothing has failed yet."""
        self._try(lambda: self._start(tracker, info))

    def tell(self, call: Callable[[TrackedRun], None]) -> None:
        """Calls a method of the run, such as `tell(lambda run: run.log(metrics, step))`, unless the tracker is off."""
        run = self._run
        if run is not None:
            self._try(lambda: call(run))

    def _start(self, tracker: Tracker, info: RunInfo) -> None:
        self._run = tracker.start(info)
        self._name = type(self._run).__name__

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # no failure of a tracker may cost the records
            reason = f"{type(error).__name__}: {reason_of(error, 200)}"
            tell(f"{self._name} failed and is off for the rest of this run: {reason}")
            self._run, self.works = None, False
