"""Publishes the report of local runs as a W&B run: its tables, figures and page, with links to the records it is made from."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mcmc.errors import note
from dflash_mcmc.tracker.wandb import artifact_name
from dflash_mcmc.tracker.wandb.page import Workspace

if TYPE_CHECKING:
    import wandb

    from dflash_mcmc.report.build import Built


def publish(built: Built, place: Workspace, folder: Path) -> None:
    """Logs a written report to the report run of its experiment, and adds a new version of the report artifact.

    Args:
        folder: folder in which wandb/ is created.
    """
    import wandb

    name = f"report-{place.experiment}" if place.experiment else "report"
    (folder / "wandb").mkdir(parents=True, exist_ok=True)
    with wandb.init(entity=place.entity, project=place.project, id=artifact_name(name), name=name.replace("-", " "),
                    group=place.experiment, job_type="report", dir=folder, mode="online", resume="allow",
                    settings=wandb.Settings(silent=True, console="off"), reinit="finish_previous") as run:
        for drawn in (drawn for study in built.studies for drawn in study.runs):
            _use(run, f"{place.entity}/{place.project}/{artifact_name('records', drawn.experiment, drawn.digest)}:latest")
        shown: dict[str, wandb.Table | wandb.Image] = {f"report/{path.stem}": _table(path)
                                                       for path in sorted((built.folder / "tables").glob("*.csv"))}
        shown.update({f"report/{path.stem}": wandb.Image(str(path))
                      for path in sorted((built.folder / "figures").glob("*.png"))})
        run.log({**shown, "report/page": wandb.Html(built.page, inject=False)})
        artifact = wandb.Artifact(artifact_name(name), "report")
        artifact.add_dir(str(built.folder))
        run.log_artifact(artifact)


def _use(run: wandb.Run, name: str) -> None:
    try:
        run.use_artifact(name)
    except Exception as error:  # the record artifact does not exist; the type depends on the version of W&B's client
        note(f"{name} is not in W&B ({type(error).__name__}), so the report's lineage lacks it; to upload it: wandb sync "
             "outputs/wandb/offline-run-*")


def _table(path: Path) -> wandb.Table:
    """A CSV file as a W&B table; numbers as floats, empty cells as None."""
    import wandb

    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return wandb.Table(columns=[*header], data=[[_value(cell) for cell in row] for row in rows], allow_mixed_types=True)


def _value(cell: str) -> float | str | None:
    try:
        return float(cell)
    except ValueError:
        return cell or None
