"""`python -m dflash_mcmc.runs [FOLDER ...]` lists runs with their state, accuracy, cost and age. It writes nothing."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from dflash_mcmc.errors import RunBusy, UserError, one_line
from dflash_mcmc.process import program

DONE, PARTIAL, RUNNING, DAMAGED = "done", "partial", "running", "damaged"


class Listed(NamedTuple):
    """A run in the list."""

    run: str
    """The run's folder."""
    state: str
    """`done`: the results cover all records. `partial`: records may be missing, and the command of the run continues it.
    `running`: another process has the run open. `damaged`: a file of the run cannot be read, as `reason` says."""
    label: str | None
    """The condition or the components, and the fields that differ from their defaults."""
    records: int | None
    """Samples, or units of a probe."""
    accuracy: float | None
    """Share of the recorded samples that are correct; None for probes and for data sets without answers."""
    token_forwards: float | None
    """Forward passes of all recorded samples, in tokens; None for probes."""
    started: str | None
    """The time of the last start."""
    reason: str = ""
    """Why the run is `damaged`."""


def listed(folders: Sequence[str | Path]) -> list[Listed]:
    """The runs below the folders, the newest start first. Raises UserError for a folder without runs."""
    from dflash_mcmc.report.reading import run_folders

    return sorted((_listed(entry.folder) for entry in run_folders(folders)), key=lambda run: run.started or "", reverse=True)


def _listed(folder: Path) -> Listed:
    from dflash_mcmc.store.described import RUN, described
    from dflash_mcmc.store.reading import read_records

    label, started = None, None
    try:
        running = _is_open(folder)
        identity, sessions = described(folder / RUN)
        started = started if isinstance(started := sessions[-1].get("started"), str) else None
        label = _label(folder, identity)
        records: list[dict[str, Any]] = [dict(record) for record in read_records(folder)]
        state = RUNNING if running else DONE if _is_summarised(folder, len(records)) else PARTIAL
    except UserError as error:
        return Listed(str(folder), DAMAGED, label, None, None, None, started, str(error))
    return Listed(str(folder), state, label, len(records), _accuracy(records), _forwards(records), started)


def _is_open(folder: Path) -> bool:
    from dflash_mcmc.store.locks import is_open

    try:
        return is_open(folder)
    except RunBusy:  # this process itself, which lists runs from a notebook
        return True


def _label(folder: Path, identity: dict[str, Any]) -> str:
    from dflash_mcmc.config.identity import configuration_of, run_label
    from dflash_mcmc.report.reading import name_of_run

    config = configuration_of(folder)
    return run_label(name_of_run(identity, config), config)


def _is_summarised(folder: Path, num_records: int) -> bool:
    """Whether the results of the run cover all its records. They are written when nothing that was requested is missing."""
    from dflash_mcmc.store.described import json_object
    from dflash_mcmc.store.files import is_there

    path = folder / "summary.json"
    if not is_there(path):
        return False
    summary = json_object(path)
    return summary.get("num_samples", summary.get("num_units")) == num_records > 0


def _accuracy(records: Sequence[Any]) -> float | None:
    from dflash_mcmc.statistics.outcomes import score

    graded = [record for record in records if record.get("verdict") is not None]
    return sum(score(record) for record in graded) / len(graded) if graded else None


def _forwards(records: Sequence[dict[str, Any]]) -> float | None:
    from dflash_mcmc.statistics.outcomes import forwards_together

    counted = [record for record in records if "token_forwards" in record and "verdict" in record]
    return forwards_together(cast("Any", counted)) if counted else None


def table(runs: Sequence[Listed], now: datetime.datetime) -> str:
    """A table of runs, and a line for each damaged one."""
    from dflash_mcmc.report.parts import ReportTable, text_of

    shown = text_of(ReportTable("", "", {
        "run": "run", "label": "label", "state": "state", "records": ("records", "count"), "accuracy": ("accuracy", "share"),
        "token-forwards": ("token_forwards", ",.0f"), "age": lambda row: age(row["started"], now)},
        [run._asdict() for run in runs]))
    reasons = [one_line(f"damaged: {run.reason}") for run in runs if run.state == DAMAGED]
    return "\n".join([shown, *([""] if reasons else []), *reasons])


def age(started: str | None, now: datetime.datetime) -> str:
    """The time since a start in its largest unit: `5 s`, `12 min`, `3 h`, `8 d`; `-` if the start is unknown."""
    try:
        then = datetime.datetime.fromisoformat(started or "")
    except ValueError:
        return "-"
    seconds = (now - (then if then.tzinfo else then.astimezone())).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    parser = program.OneLineParser("python -m dflash_mcmc.runs", description="Lists runs with state, accuracy, cost and age. "
                                   "done: the results cover all records. partial: the run's command continues it. running: a "
                                   "process has it open. damaged: a file cannot be read; the reason stands below the table.")
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="run folder, experiment folder, glob, or W&B run id; "
                        "default: all runs below outputs")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER", help="default: outputs")
    options = parser.parse_args(arguments)
    if not options.folders and not options.outputs.is_dir():
        raise UserError(f"--outputs: given {str(options.outputs)!r}, which is no folder; allowed: a folder with runs")
    print(table(listed(options.folders or [options.outputs]), datetime.datetime.now().astimezone()))


if __name__ == "__main__":
    main()
