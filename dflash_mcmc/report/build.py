"""Builds a report from any set of runs: an HTML page, the same content as Markdown, CSV tables, PNG and SVG figures.

Runs are compared only with runs over the same dataset; each dataset is a part of the page.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.identity import configuration_of, labels_of, name_of_path
from dflash_mcmc.errors import UserError, tell
from dflash_mcmc.report import figure, page
from dflash_mcmc.report.parts import ReportColumn, ReportPart, ReportTable, Section, paragraphs, percent, text_of
from dflash_mcmc.report.probed import csv_of, table_of
from dflash_mcmc.report.published import RUN, beside, source_of
from dflash_mcmc.report.reading import Found, Run, labelled, read, run_folders
from dflash_mcmc.report.sections import chains, compared, configuration, guided, mixing, overall, paired, samples, swept
from dflash_mcmc.report.study import ProbeRun, Study, named, study_of
from dflash_mcmc.statistics.intervals import cautions
from dflash_mcmc.statistics.outcomes import accuracy
from dflash_mcmc.store.described import identity_if_readable, object_if_readable
from dflash_mcmc.store.files import write_atomically

_TEXT = """
Each dataset has a part of this page, and runs are compared only within it. An empty cell means that no such run is here.
"""


class DatasetRuns(NamedTuple):
    """Runs over one dataset."""

    name: str
    """Name of the dataset; with others of this name, that of its file, or a number. Names of files begin with it."""
    runs: list[Run]


def by_dataset(runs: Sequence[Run]) -> tuple[list[DatasetRuns], list[str]]:
    """The runs by their datasets, in order of first appearance, and a sentence for each dataset that has two versions.

    Two runs are over one dataset if their dataset has the same name, and the same content or a problem in common. Problems
    with the same id and other answers are other problems. Raises UserError if records disagree with their dataset.
    """
    groups: list[list[Run]] = []
    golds: list[dict[str, str]] = []
    notes: list[str] = []
    for run in runs:
        own = {record["problem"]: record["gold"] for record in run.records}
        versions: list[str] = []
        index = next((index for index, group in enumerate(groups) if _belongs(run, own, group, golds[index], versions)), None)
        if index is None:
            notes += versions
            groups.append([run])
            golds.append(own)
        else:
            groups[index].append(run)
            golds[index] |= own
    names = _names([group[0] for group in groups])
    several = len(groups) > 1
    return [DatasetRuns(name, labelled(group) if several else group) for name, group in zip(names, groups, strict=True)], notes


def _belongs(run: Run, own: dict[str, str], group: list[Run], golds: dict[str, str], versions: list[str]) -> bool:
    """Whether a run, with its `own` gold answers, is over a group's dataset. Adds a sentence for another version of it."""
    first = group[0]
    if run.component("dataset") != first.component("dataset"):
        return False
    content = run.identity.get("dataset.content")
    alike = any(content == other.identity.get("dataset.content") for other in group)
    other = next((problem for problem in own if golds.get(problem, own[problem]) != own[problem]), None)
    if other is None:
        return alike or not own.keys().isdisjoint(golds)
    said = f"problem {other!r} has the answer {golds[other]!r} in {first.folder} and {own[other]!r} in {run.folder}"
    if alike:
        raise UserError(f"runs: {said}, though both say that their dataset is the same; allowed: records as a run wrote them")
    if _file(run) == _file(first):
        versions.append(f"two versions of {run.component('dataset')} are here: {said}; they are separate datasets")
    return False


def _file(run: Run) -> str:
    """The name of the dataset's file or its hub name; empty for a dataset without one."""
    return name_of_path((run.config.get("dataset") or {}).get("path"))


def _names(firsts: Sequence[Run]) -> list[str]:
    """A name for each dataset, by its first run. Datasets of one name have the names of their files, or else numbers."""
    names = [run.component("dataset") for run in firsts]
    paths = list(map(_file, firsts))
    names = [path if path and names.count(name) > 1 and paths.count(path) == 1 else name
             for name, path in zip(names, paths, strict=True)]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80] or "dataset" for name in names]
    again = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, again, strict=True)]


def studies_of(runs: Sequence[Run], baseline: str | None = None, pair: Sequence[str] | None = None,
               alphas: Sequence[float] = ()) -> tuple[list[Study], list[str]]:
    """A study of each dataset, and sentences about datasets. See `study_of` for the arguments; raises UserError as it does.

    With several datasets, `baseline` and `pair` hold where the dataset has such runs. They must name runs of at least one.
    """
    datasets, notes = by_dataset(runs)
    if len(datasets) > 1:
        for option, asked in (("--baseline", [baseline] if baseline else []), ("--pair", pair or [])):
            if not any(_has(dataset.runs, asked) for dataset in datasets):
                labels = dict.fromkeys(run.label for dataset in datasets for run in dataset.runs)
                raise UserError(f"{option}: given {' '.join(asked)}, which no dataset has; allowed: "
                                + ", ".join(map(repr, list(labels)[:20])))
    studies = []
    for name, of in datasets:
        own = baseline if len(datasets) == 1 or (baseline and _has(of, [baseline])) else None
        studies.append(study_of(of, own, pair if len(datasets) == 1 or _has(of, pair or []) else None, alphas, name))
    return studies, notes


def _has(runs: Sequence[Run], names: Sequence[str]) -> bool:
    return all(named(runs, name) for name in names)


def side_by_side(studies: Sequence[Study]) -> Section:
    """Accuracy of every run on every dataset: a row for each label, a column for each dataset."""
    labels = list(dict.fromkeys(run.label for study in studies for run in study.runs))
    rows: list[dict] = []
    for label in labels:
        row: dict = {"run": label}
        for study in studies:
            run = next((run for run in study.runs if run.label == label), None)
            row |= {} if run is None else accuracy(run.records).columns(study.dataset)
        rows.append(row)

    def column(name: str) -> ReportColumn:
        return ReportColumn(
            name, lambda row: percent(row[name], row[f"{name}_low"], row[f"{name}_high"]) if name in row else "")

    return Section("datasets", "All datasets", paragraphs(_TEXT),
                   [ReportTable("datasets", "Accuracy on each dataset",
                                [ReportColumn("run", lambda row: row["run"], number=False),
                                 *(column(study.dataset) for study in studies)],
                                rows)])


_SECTIONS = (
    overall.section, samples.section, paired.section, chains.matched_section, chains.rules_section, paired.strata_section,
    paired.overlap_section, compared.interaction_section, overall.cost_section, overall.measures_section,
    chains.agreement_section, guided.section, swept.section, chains.section, mixing.section, compared.section,
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
        first = [(part.name, text_of(part.sections[0].tables[0])) for part in self.parts]
        return "\n\n".join(f"{name}\n{text}" if name else text for name, text in first)


def build(runs: Sequence[str | Path], out: Path | None = None, *, baseline: str | None = None,
          pair: Sequence[str] | None = None, lenient: bool = False, outputs: Path = Path("outputs"),
          alphas: Sequence[float] = (), formats: Collection[str] = ()) -> Built:
    """Reads the runs and writes their report from their records. Removes an earlier report's files from the folder.

    If all runs are of probes, the report has the tables of the probes, from their summaries.

    Args:
        runs: run folders, experiment folders, globs, or W&B run ids, which are looked up below `outputs`.
        out: folder to write to. None means `report` in the folder that contains all runs, usually their experiment's.
        baseline: see `study_of`.
        pair: see `study_of`.
        lenient: skips corrupt files and corrupt lines, and lists them, instead of raising.
        alphas: see `study_of`.
        formats: `pdf` for figures and `latex` for tables, beside PNG, SVG and CSV.

    Raises a one-line UserError.
    """
    folders, studies = run_folders(runs, outputs), list[Study]()
    _progress(f"reading {len(folders)} runs")
    if all("probe" in identity_if_readable(entry.folder) for entry in folders):
        heading, sections = report_of(folders)
        parts = [ReportPart("", "", (), sections)]
    else:
        probes = [probe for entry in folders if "probe" in identity_if_readable(entry.folder)
                  and (probe := _probe_run(entry.folder)) is not None]
        beside = {probe.folder for probe in probes}
        read_runs, left_out = read([entry._replace(named=entry.named and entry.folder not in beside) for entry in folders],
                                   lenient)
        studies, notes = studies_of(read_runs, baseline, pair, alphas)
        studies = [study._replace(probes=probes) for study in studies]
        folders = [Found(run.folder, True) for study in studies for run in study.runs]
        parts = _parts(studies)
        heading = page.heading_of(studies, parts[0].verdict, [*left_out, *notes])
    folder = out or Path(os.path.commonpath([run.folder.parent.resolve() for run in folders])) / "report"
    write(folder, heading, parts, formats)
    return Built(folder, heading, parts, studies)


def _parts(studies: Sequence[Study]) -> list[ReportPart]:
    """The sections of each dataset. With several, the names of their tables and figures begin with that of the dataset."""
    parts = [] if len(studies) == 1 else [ReportPart("", "", (), [side_by_side(studies)])]
    for study in studies:
        _progress(f"comparing {len(study.runs)} runs on {study.dataset}")
        sections = [section for section_of in _SECTIONS if (section := section_of(study)) is not None]
        verdict = paired.verdict_of(study, sections)
        parts.append(ReportPart("", "", (), sections, verdict) if len(studies) == 1 else ReportPart(
            study.dataset, page.counts_of(study), study.warnings,
            [_named(section, study.dataset) for section in sections], verdict))
    return parts


def _named(section: Section, dataset: str) -> Section:
    start = f"fig_{dataset}_"
    drawings = [drawing if drawing.name.startswith(start) else
                drawing._replace(name=start + drawing.name.removeprefix("fig_")) for drawing in section.drawings]
    return section._replace(tables=[table._replace(name=f"{dataset}_{table.name}") for table in section.tables],
                            drawings=drawings)


def _progress(text: str) -> None:
    """A line in a terminal, for who waits; logs have none."""
    if sys.stderr.isatty():
        tell(text)


def write(folder: Path, heading: page.Heading, parts: list[ReportPart], formats: Collection[str] = ()) -> None:
    """Writes tables, figures, Markdown and the page. The page is written last: when it exists, every file it names exists.

    Raises UserError.
    """
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
            if "latex" in formats:
                write_atomically(path.with_suffix(".tex"), _encoded(text_of(table, form="latex_booktabs")))
                written.add(path.with_suffix(".tex"))
        drawings = [drawing for section in sections for drawing in section.drawings]
        _progress(f"drawing {len(drawings)} figures into {figures}")
        with figure.style(math=False):
            for drawing in drawings:
                drawn = drawing.make()
                if drawn.get_layout_engine() is not None:
                    drawn.draw_without_rendering()
                    drawn.set_layout_engine("none")  # the layout is computed once for both files
                written |= figure.save(drawn, figures, drawing.name, formats)
        if again:  # remove files of an earlier report that this report has no data for
            for old in {*tables.glob("*.csv"), *tables.glob("*.tex"), *figures.glob("fig_*.???")} - written:
                old.unlink()
        write_atomically(folder / "report.md", _encoded(page.markdown(heading, parts)))
        write_atomically(folder / "report.html", _encoded(page.html(heading, parts, figures)))
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {error.strerror or error}") from error


def _encoded(text: str) -> bytes:
    """A text in UTF-8. Half a character, which JSON can hold and UTF-8 cannot, becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


_PROBES_TEXT = """
Figures are in the folders of the runs: {folders}. Intervals are 95 %, from a bootstrap over problems.
"""
_PUBLISHED = """
Rows whose first cell begins with "published" are quoted without change from {source}. They are shown beside the rows of the
same kind, and are not used in any statistic.
"""


def _probe_run(folder: Path) -> ProbeRun | None:
    """The run of a probe; None if its summary has no tables, each a list of rows."""
    summary = object_if_readable(folder / "summary.json")
    tables, names = summary.get("tables"), (summary.get("probe"), summary.get("condition"))
    known = isinstance(tables, dict) and all(isinstance(name, str) for name in names) and all(
        isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in tables.values())
    return ProbeRun(folder, identity_if_readable(folder), summary) if known else None


def report_of(found: Sequence[Found]) -> tuple[page.Heading, list[Section]]:
    """The heading and a section per probe. Raises UserError if no run is finished."""
    runs, warnings = [], []
    for entry in found:
        if (run := _probe_run(entry.folder)) is not None:
            runs.append(run)
        else:
            warnings.append(f"left out: {entry.folder}: not a finished run of a probe")
    if not runs:
        raise UserError("; ".join(warnings))
    of_probe: dict[str, list[ProbeRun]] = {}
    for run in runs:
        of_probe.setdefault(run.summary["probe"], []).append(run)
    experiments = ", ".join(dict.fromkeys(run.folder.parent.name for run in runs))
    heading = page.Heading(f"{experiments}: {len(runs)} run{'s' * (len(runs) > 1)} of probes",
                      f"Probes: {', '.join(of_probe)}.", warnings)
    return heading, [_section_of_probe(probe, of) for probe, of in of_probe.items()]


def _section_of_probe(probe: str, runs: list[ProbeRun]) -> Section:
    labels = labels_of([run.summary["condition"] for run in runs], [run.identity for run in runs],
                       [configuration_of(run.folder) for run in runs])
    identities = {label: run.identity for label, run in zip(labels, runs, strict=True)}
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.summary["tables"]):
        rows = [{RUN: label, **row} for label, run in zip(labels, runs, strict=True)
                for row in run.summary["tables"].get(name, [])]
        if rows:
            tables.append(table_of(f"{probe}_{name}", name.replace("_", " "), beside(probe, identities, name, rows)))
    text = paragraphs(_PROBES_TEXT.format(folders=", ".join(run.folder.name for run in runs)))
    text += cautions([run.summary.get("num_problems", 0) for run in runs])
    source = source_of(probe)
    return Section(probe, f"probe={probe}", text + (paragraphs(_PUBLISHED.format(source=source)) if source else []), tables)
