"""A tracker that writes what it is told to `metrics.jsonl` in the run folder. After `use()`, `tracker=trackio` is this one."""

import json
from pathlib import Path

from dflash_mcmc.tracker import RunInfo, TrackedRun
from dflash_mcmc.tracker.trackio import TrackioTracker


class Lines(TrackedRun):
    """Appends a line at each call."""

    def __init__(self, path: Path):
        self._path = path

    def log(self, metrics: dict, step: int) -> None:
        self._write({"step": step, **metrics})

    def summary(self, metrics: dict, records: list[dict]) -> None:
        self._write({"summary": metrics})

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        if tables or figures:
            self._write({"tables": {name: len(rows) for name, rows in tables.items()},
                         "figures": [str(path.relative_to(folder)) for path in figures]})

    def preempt(self) -> None:
        self._write({"preempted": True})

    def _write(self, entry: dict) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def use(set_attribute=setattr) -> None:
    """Writes lines in place of Trackio's dashboard, in a program that a test starts or with `monkeypatch.setattr`."""
    def start(tracker: TrackioTracker, info: RunInfo) -> Lines:
        return Lines(info.folder / "metrics.jsonl")

    set_attribute(TrackioTracker, "start", start)
