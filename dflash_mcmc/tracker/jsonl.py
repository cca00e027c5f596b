"""Metrics as JSON lines in the run folder, for users without a tracking service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dflash_mcmc.errors import writing
from dflash_mcmc.registry import register
from dflash_mcmc.store.files import open_to_append
from dflash_mcmc.tracker import RunInfo, TrackedRun, Tracker


@register("tracker", "jsonl")
@dataclass(slots=True, kw_only=True)
class JsonlTracker(Tracker):
    """JSON lines in the run folder: one per finished sample, one for the summary, and one that lists tables and figures."""

    def start(self, info: RunInfo) -> JsonlWriter:
        """A writer to `metrics.jsonl` in the run folder."""
        return JsonlWriter(info.folder / "metrics.jsonl")


class JsonlWriter(TrackedRun):
    """Appends lines to the file. The file is open only while a line is written. Raises UserError, also for a link."""

    def __init__(self, path: Path):
        self._path = path

    def log(self, metrics: dict, step: int) -> None:
        self._write({"step": step, **metrics})

    def summary(self, metrics: dict, records: list[dict]) -> None:
        self._write({"summary": metrics})

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        """Writes a line with the number of rows of each table and the figure files, unless there are none."""
        if tables or figures:
            self._write({"tables": {name: len(rows) for name, rows in tables.items()},
                         "figures": [str(path.relative_to(folder)) for path in figures]})

    def preempt(self) -> None:
        self._write({"preempted": True})

    def _write(self, entry: dict) -> None:
        with writing(self._path), open_to_append(self._path) as file:
            file.write(json.dumps(entry).encode() + b"\n")
