"""Tracking with Trackio: a dashboard on this machine, without an account."""

import contextlib
import importlib.util
import io
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_mcmc.components import Settings, register, runtime
from dflash_mcmc.errors import UserError
from dflash_mcmc.tracker import RunInfo, TrackedRun, Tracker, sample_rows


@register("tracker", "trackio")
@dataclass(slots=True, kw_only=True)
class TrackioTracker(Tracker):
    """Trackio's dashboard on this machine: groups, names, running accuracy, summaries and samples as in W&B."""

    project: str = runtime("dflash_mcmc", "project name")
    folder: str = runtime("outputs", "parent folder of trackio/, which TRACKIO_DIR replaces")

    def check(self, config: Settings) -> None:
        """Raises UserError before sampling if the package is missing."""
        if importlib.util.find_spec("trackio") is None:
            raise UserError("tracker=trackio: the package trackio is not installed: pip install trackio")

    def start(self, info: RunInfo) -> "TrackioRun":
        """Opens the run, or resumes it: its name ends with the start of its identity."""
        folder = os.environ.setdefault("TRACKIO_DIR", str(Path(self.folder).resolve() / "trackio"))  # read at the import
        with contextlib.redirect_stdout(io.StringIO()):  # it prints five lines on how to see the dashboard
            import trackio

            known: list[str] = []
            with contextlib.suppress(ValueError):  # of a new project
                known = [run.name for run in trackio.Api().runs(self.project)]
            end = f" {info.identity[:6]}"  # by which a run is found that another command has named otherwise
            run: Any = trackio.init(
                project=self.project, group=info.experiment,
                name=next((name for name in known if name.endswith(end)), f"{info.name or info.condition}{end}"),
                config={**info.config, "job_type": info.condition, "tags": list(info.tags), "identity": info.identity},
                resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        _tell(folder, self.project)
        return TrackioRun(run, info)


class TrackioRun(TrackedRun):
    """An open run. Values are logged over the number of samples."""

    def __init__(self, run: Any, info: RunInfo):
        self._run, self._info, self._steps = run, info, 0

    def log(self, metrics: dict, step: int) -> None:
        self._steps = step
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def summary(self, metrics: dict, records: list[dict]) -> None:
        """Logs numbers of the summary as `summary/...`, and the table of all samples."""
        self._steps = len(records)
        values = {f"summary/{name}": value for name, value in metrics.items() if isinstance(value, int | float)}
        if rows := sample_rows(records, self._info.folder):
            values["samples"] = _table(rows)
        self._run.log(values, step=self._steps)

    def publish(self, folder: Path, tables: dict[str, list[dict]], figures: list[Path]) -> None:
        """Logs tables and figures. Records and configuration are already in the folder."""
        import trackio

        shown = {f"tables/{name}": _table(rows) for name, rows in tables.items()}
        shown.update({f"figures/{path.stem}": trackio.Image(str(path)) for path in figures})
        if shown:
            self._run.log(shown, step=self._steps)

    def finish(self, exit_code: int) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # of the run of the last `init`: at most one is open


@cache
def _tell(folder: str, project: str) -> None:
    """Once in a process. A run's bar is on the terminal's last line: this shows it again below the line."""
    from tqdm.auto import tqdm

    tqdm.write(f"dashboard: TRACKIO_DIR={folder} trackio show --project {project}", file=sys.stderr)


def _table(rows: list[dict]) -> Any:
    import pandas as pd
    import trackio

    return trackio.Table(dataframe=pd.DataFrame(rows).astype(object).where(lambda cells: cells.notna(), None))
