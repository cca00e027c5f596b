"""Trackers: where metrics are shown. A failing tracker never stops a run: the run folder has everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class RunInfo(NamedTuple):
    """What a tracker is told of a run at its start."""

    identity: str
    """Twelve hexadecimal digits; a run that is continued has the same."""
    experiment: str
    condition: str
    config: dict
    folder: Path
    name: str = ""
    """For people: the condition and what tells it apart; without one the condition."""
    tags: tuple[str, ...] = ()
    """`group=component`."""


class Guarded:
    """A started tracker whose failure is told once and then forgotten. The calls are those of the tracker.

    A tracker has `start(info)`, which gives an object with `log(metrics, step)`, where step counts the samples of the run and
    never repeats, and, once all are recorded and the run's folder is written, `summary(metrics, records)` and
    `publish(folder, tables, figures)`: what the folder holds, tables by name as rows with the same keys, figures as PNG files.
    `preempt()` says that the run was asked to end, by SLURM say, and will go on. `finish(exit_code)` comes last, with 1 for a
    run that has more to draw. What is told of a run in several starts belongs together: `info.identity` is the same.
    """

    def __init__(self, tracker: object, info: RunInfo):
        self._tracker: object | None = tracker
        self._tracker = self._try(lambda: tracker.start(info))

    def log(self, metrics: dict, step: int) -> None:
        self._try(lambda: self._tracker.log(metrics, step))

    def summary(self, metrics: dict, records: list[dict]) -> None:
        self._try(lambda: self._tracker.summary(metrics, records))

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        self._try(lambda: self._tracker.publish(folder, tables, figures))

    def preempt(self) -> None:
        self._try(lambda: self._tracker.preempt())

    def finish(self, exit_code: int) -> None:
        self._try(lambda: self._tracker.finish(exit_code))

    @property
    def works(self) -> bool:
        """Whether nothing has failed yet."""
        return self._tracker is not None

    def _try(self, call: Callable[[], object]) -> object | None:
        if self._tracker is None:
            return None
        try:
            return call()
        except Exception as error:  # whatever goes wrong with a tracker, the records are what counts
            name, reason = type(self._tracker).__name__, " ".join(str(error).split())[:200]
            print(f"{name} failed and is off for the rest of this run: {type(error).__name__}: {reason}", file=sys.stderr)
            self._tracker = None
            return None
