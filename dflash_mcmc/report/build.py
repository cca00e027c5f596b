"""Builds a report from any set of runs: an HTML page, the same content as Markdown, CSV tables, PNG and SVG figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.report import figure, page, probes
from dflash_mcmc.report.locate import Found, run_folders
from dflash_mcmc.report.parts import Section
from dflash_mcmc.report.probed import csv_of
from dflash_mcmc.report.runs import read
from dflash_mcmc.report.sections import (
    agreement,
    budget,
    chains,
    compared,
    configuration,
    cost,
    interaction,
    matched,
    measures,
    overall,
    overlap,
    paired,
    provenance,
    rules,
    setting,
    strata,
    swept,
)
from dflash_mcmc.report.study import Study, study_of
from dflash_mcmc.store.files import write_atomically

_SECTIONS = (overall, budget, paired, matched, rules, strata, overlap, interaction, cost, measures, agreement, swept, chains,
             compared, configuration, setting, provenance)


class Built(NamedTuple):
    """A written report."""

    folder: Path
    heading: page.Heading
    sections: list[Section]
    study: Study | None = None
    """The runs from which the sections are computed; None for a report of probes."""

    @property
    def page(self) -> Path:
        """The HTML page of the report."""
        return self.folder / "report.html"

    @property
    def overall(self) -> str:
        """The first table of the report as text for a terminal."""
        return page.text_of(self.sections[0].tables[0])


def build(runs: Sequence[str | Path], out: Path | None = None, *, baseline: str | None = None,
          pair: Sequence[str] | None = None, lenient: bool = False, outputs: Path = Path("outputs"),
          alphas: Sequence[float] = ()) -> Built:
    """Reads the runs and writes their report from their records. Removes an earlier report's files from the folder.

    If all runs are of probes, the report has the tables of the probes, from their summaries.

    Args:
        runs: run folders, experiment folders, globs, or W&B run ids, which are looked up below `outputs`.
        out: folder to write to. None means `report` in the folder that contains all runs, usually their experiment's.
        baseline: see `study_of`.
        pair: see `study_of`.
        lenient: skips corrupt files, corrupt lines and runs over a second dataset, and lists them, instead of raising.
        alphas: see `study_of`.

    Raises a one-line UserError.
    """
    folders, study = run_folders(runs, outputs), None
    if probes.are_probes(folders):
        heading, sections = probes.report_of(folders)
    else:
        found, left_out = read(folders, lenient)
        study = study_of(found, baseline, pair, left_out, lenient, alphas)
        folders = [Found(run.folder, True) for run in study.runs]
        heading = page.heading_of(study)
        sections = [section for module in _SECTIONS if (section := module.section(study)) is not None]
    folder = out or Path(os.path.commonpath([run.folder.parent.resolve() for run in folders])) / "report"
    _write(folder, heading, sections)
    return Built(folder, heading, sections, study)


def _write(folder: Path, heading: page.Heading, sections: list[Section]) -> None:
    """Writes tables, figures, Markdown and the page. The page is written last: when it exists, every file it names exists."""
    tables, figures = folder / "tables", folder / "figures"
    again = (folder / "report.html").is_file()
    try:
        for part in (tables, figures):
            part.mkdir(parents=True, exist_ok=True)
        written = set()
        for table in (table for section in sections for table in section.tables):
            path = tables / f"{table.name}.csv"
            write_atomically(path, csv_of(table.rows if table.data is None else table.data))
            written.add(path)
        with figure.style():
            for drawing in (drawing for section in sections for drawing in section.drawings):
                drawn = drawing.make()
                if drawn.get_layout_engine() is not None:
                    drawn.draw_without_rendering()
                    drawn.set_layout_engine("none")  # the layout is computed once for both files
                figure.save(drawn, figures, drawing.name)
                written |= {figures / f"{drawing.name}.png", figures / f"{drawing.name}.svg"}
        if again:  # remove files of an earlier report that this report has no data for
            for old in {*tables.glob("*.csv"), *figures.glob("fig_*.png"), *figures.glob("fig_*.svg")} - written:
                old.unlink()
        write_atomically(folder / "report.md", page.markdown(heading, sections))
        write_atomically(folder / "report.html", page.html(heading, sections, figures))
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {error.strerror or error}") from error
