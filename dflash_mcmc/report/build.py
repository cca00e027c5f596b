"""Builds a report from any set of runs: an HTML page, the same content as Markdown, CSV tables, PNG and SVG figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.errors import UserError
from dflash_mcmc.report import datasets, figure, page, probes
from dflash_mcmc.report.parts import ReportPart, Section
from dflash_mcmc.report.probed import csv_of
from dflash_mcmc.report.reading import Found, read, run_folders
from dflash_mcmc.report.sections import budget, chains, compared, configuration, overall, paired, samples, swept
from dflash_mcmc.report.study import Study
from dflash_mcmc.store.files import write_atomically

_SECTIONS = (
    overall.section, samples.section, budget.section, paired.section, chains.matched_section, chains.rules_section,
    paired.strata_section, paired.overlap_section, compared.interaction_section, overall.cost_section,
    overall.measures_section, chains.agreement_section, swept.section, chains.section, compared.section,
    configuration.section, configuration.setting_section, configuration.provenance_section)
"""The sections in their order on the page."""


class Built(NamedTuple):
    """A written report."""

    folder: Path
    heading: page.Heading
    parts: list[ReportPart]
    """One; with several datasets, one that compares them and one for each."""
    studies: Sequence[Study] = ()
    """The runs from which the sections are computed, by dataset; none for a report of probes."""

    @property
    def sections(self) -> list[Section]:
        """The sections of all parts."""
        return [section for part in self.parts for section in part.sections]

    @property
    def page(self) -> Path:
        """The HTML page of the report."""
        return self.folder / "report.html"

    @property
    def overall(self) -> str:
        """The first table of the report as text for a terminal; with several datasets the first table of each part."""
        first = [(part.name, page.text_of(part.sections[0].tables[0])) for part in self.parts]
        return "\n\n".join(f"{name}\n{text}" if name else text for name, text in first)


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
        lenient: skips corrupt files and corrupt lines, and lists them, instead of raising.
        alphas: see `study_of`.

    Raises a one-line UserError.
    """
    folders, studies = run_folders(runs, outputs), list[Study]()
    if probes.are_probes(folders):
        heading, sections = probes.report_of(folders)
        parts = [ReportPart("", "", (), sections)]
    else:
        found, left_out = read(folders, lenient)
        studies, notes = datasets.studies_of(found, baseline, pair, alphas)
        folders = [Found(run.folder, True) for study in studies for run in study.runs]
        heading, parts = page.heading_of(studies, [*left_out, *notes]), _parts(studies)
    folder = out or Path(os.path.commonpath([run.folder.parent.resolve() for run in folders])) / "report"
    _write(folder, heading, parts)
    return Built(folder, heading, parts, studies)


def _parts(studies: Sequence[Study]) -> list[ReportPart]:
    """The sections of each dataset. With several, the names of their tables and figures begin with that of the dataset."""
    sections = [[section for section_of in _SECTIONS if (section := section_of(study)) is not None] for study in studies]
    if len(studies) == 1:
        return [ReportPart("", "", (), sections[0])]
    parts = [ReportPart("", "", (), [datasets.side_by_side(studies)])]
    for study, found in zip(studies, sections, strict=True):
        named = [_named(section, study.dataset) for section in found]
        parts.append(ReportPart(study.dataset, page.counts_of(study), study.warnings, named))
    return parts


def _named(section: Section, dataset: str) -> Section:
    start = f"fig_{dataset}_"
    drawings = [drawing if drawing.name.startswith(start) else
                drawing._replace(name=start + drawing.name.removeprefix("fig_")) for drawing in section.drawings]
    return section._replace(tables=[table._replace(name=f"{dataset}_{table.name}") for table in section.tables],
                            drawings=drawings)


def _write(folder: Path, heading: page.Heading, parts: list[ReportPart]) -> None:
    """Writes tables, figures, Markdown and the page. The page is written last: when it exists, every file it names exists."""
    tables, figures = folder / "tables", folder / "figures"
    sections = [section for part in parts for section in part.sections]
    again = (folder / "report.html").is_file()
    try:
        for part in (tables, figures):
            part.mkdir(parents=True, exist_ok=True)
        written = set()
        for table in (table for section in sections for table in section.tables):
            path = tables / f"{table.name}.csv"
            write_atomically(path, _encoded(csv_of(table.rows if table.data is None else table.data)))
            written.add(path)
        with figure.style(math=False):
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
        write_atomically(folder / "report.md", _encoded(page.markdown(heading, parts)))
        write_atomically(folder / "report.html", _encoded(page.html(heading, parts, figures)))
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {error.strerror or error}") from error


def _encoded(text: str) -> bytes:
    """A text in UTF-8. Half a character, which JSON can hold and UTF-8 cannot, becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
