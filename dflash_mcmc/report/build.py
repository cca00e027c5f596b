"""Builds a report from any set of runs: an HTML page, the same content as Markdown, CSV tables, PNG and SVG figures.

Runs are compared only with runs over the same dataset; each dataset is a part of the page. The page is one self-contained
file; its figures are SVG elements whose colours are those of the page's scheme. The Markdown refers to the figure files.
"""

import base64
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Sequence
from html import escape as escaped_html
from pathlib import Path
from typing import NamedTuple

from dflash_mcmc.config.identity import configuration_of, labels_of, name_of_path
from dflash_mcmc.errors import UserError, printable, tell
from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import Drawing, ReportPart, ReportTable, Section, as_text, csv_of, number, paragraphs, table_of
from dflash_mcmc.report.reading import RUN_COLUMN, Found, Run, beside, labelled, read, run_folders, source_of
from dflash_mcmc.report.sections import chains, compared, configuration, overall, paired, samples, swept
from dflash_mcmc.report.study import ProbeRun, Study, named, study_of
from dflash_mcmc.statistics.estimates import accuracy, cautions
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.store.records import identity_if_readable, object_if_readable

_TEMPLATE = Path(__file__).with_name("template")
_BOUND = re.compile(r"(?<=\d) (?=%)|(?<=,) (?=[^\[\]]*\])")
"""Spaces of a cell at which no line is broken: before a per cent sign, and inside an interval."""
_BREAKS = re.compile(r"(?<=[A-Za-z\]\}])[.=/](?=[A-Za-z#\[\{])")
"""Signs inside names, such as `dataset.max_new_tokens`, after which a line can be broken."""


def html(title: str, parts: Sequence[ReportPart], figures: Path) -> str:
    """The page as HTML, headed by what its first part says of the data. It loads nothing over a network.

    Its figures are SVG elements, which follow the page's colours.

    No other script than the page's own can run, because the page's policy names them by their hashes.

    Args:
        figures: folder of the figure files.
    """
    from jinja2 import Environment
    from markupsafe import Markup, escape

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breaks"] = lambda text: Markup(_BREAKS.sub(r"\g<0><wbr>", str(escape(text))))
    environment.filters["bound"] = lambda cell: _BOUND.sub("\u00a0", cell)
    samples = any(section.samples for part in parts for section in part.sections)
    scripts = [_file("tables.js"), *([_file("samples.js")] if samples else [])]

    def picture(drawing: Drawing) -> Markup:
        return Markup(svg((figures / f"{drawing.name}.svg").read_text(encoding="utf-8"), drawing.name, drawing.title))

    return environment.from_string(_file("page.html.j2")).render(
        title=title, parts=parts, picture=picture,
        version=importlib.metadata.version("dflash_mcmc"), style=Markup(_file("page.css")), scripts=list(map(Markup, scripts)),
        hashes=Markup(" ".join(  # of the Content-Security-Policy
            f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)))


def markdown(title: str, parts: Sequence[ReportPart]) -> str:
    """The report's text and tables as Markdown, with links to the figure files."""
    lines = []
    for part in parts:
        lines += [f"# {_escaped(part.name or title)}", *map(_escaped, [*part.verdict, part.counts]),
                  *(f"> **Note:** {_escaped(warning)}" for warning in part.warnings)]
        for section in part.sections:
            lines += [f"## {_escaped(section.title)}", *map(_escaped, section.text)]
            lines += [f"![{_escaped(drawing.title)}](figures/{drawing.name}.png)" for drawing in section.drawings]
            for table in section.tables:
                lines += [f"**{_escaped(table.title)}**", as_text(table, _escaped)]
    return "\n\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    for sign in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(sign, "\\" + sign)
    return printable(text.replace("\n", " "))


def _file(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


_NAMES = {"#ffffff": "ground", "#000000": "ink", figure.INK: "ink", figure.RIGHT: "right", figure.WRONG: "wrong",
          figure.OTHER: "other", figure.GREEN: "green", figure.PURPLE: "purple", figure.ORANGE: "orange", figure.SKY: "sky",
          figure.GRID: "grid", figure.PALE: "pale"}
"""The variables `--fig-...` of `template/page.css` for the colours of figures. Other colours, as of heat maps, stay."""
_VARIABLES = {colour.lower(): f"var(--fig-{name})" for colour, name in _NAMES.items()}
_COLOUR = re.compile(r"(?<=[:\s\"])#[0-9a-fA-F]{6}(?=[;\"])")
_LEFT_OUT = re.compile(r'<!--.*?-->|<metadata>.*?</metadata>|<style type="text/css">.*?</style>', re.DOTALL)


def svg(text: str, name: str, title: str) -> str:
    """An SVG file of matplotlib as an element of an HTML page.

    Args:
        name: name of the figure, which is unique in the page: ids of different figures may be the same otherwise.
        title: alternative text.
    """
    start = text.index("<svg")
    body = _LEFT_OUT.sub("", text[start:])
    head, _, rest = body.partition(">")
    width, height = (4.0 / 3.0 * float(points) for points in re.findall(r" (?:width|height)=\"([\d.]+)pt\"", head))  # pixels
    box = re.findall(r"viewBox=\"([-\d. ]+)\"", head)[0]
    rest = re.sub(r"(\bid=\"|href=\"#|url\(#)", lambda match: f"{match[0]}{name}-", rest)
    rest = _COLOUR.sub(lambda match: _VARIABLES.get(match[0].lower(), match[0]), rest)
    return (f'<svg role="img" aria-label="{escaped_html(title)}" '
            f'viewBox="{box}" width="{width:.0f}" height="{height:.0f}">{rest}')


_SECTIONS = (
    overall.section, samples.section, paired.section, chains.matched_section, chains.rules_section, paired.strata_section,
    paired.overlap_section, compared.interaction_section, overall.cost_section, chains.agreement_section,
    swept.guided_section, swept.section, chains.section, chains.mixing_section, compared.section, configuration.section,
    configuration.setting_section, configuration.provenance_section)
"""The sections in their order on the page."""
_TEXT = """
Each dataset has a part of this page, and runs are compared only within it. An empty cell means that no such run is here.
"""
_PROBES_TEXT = """
Figures are in the folders of the runs: {folders}. Intervals are 95 %, from a bootstrap over problems.
"""
_PUBLISHED = """
Rows whose first cell begins with "published" are quoted without change from {source}. They are shown beside the rows of the
same kind, and are not used in any statistic.
"""


def by_dataset(runs: Sequence[Run]) -> tuple[list[tuple[str, list[Run]]], list[str]]:
    """The runs by the names of their datasets, in order of first appearance, and a sentence for each dataset of two versions.

    Two runs are over one dataset if their dataset has the same name, and the same content or a problem in common. Problems
    with the same id and other answers are other problems. Datasets of one name have the names of their files, or else numbers.
    Raises UserError if records disagree with their dataset.
    """
    def file_of(run: Run) -> str:
        return name_of_path((run.config.get("dataset") or {}).get("path"))

    groups, golds, notes = list[list[Run]](), list[dict[str, str]](), list[str]()
    for run in runs:
        own, versions = {record["problem"]: record["gold"] for record in run.records}, []
        for group, known in zip(groups, golds, strict=True):
            if run.component("dataset") != (first := group[0]).component("dataset"):
                continue
            alike = run.identity.get("dataset.content") in [other.identity.get("dataset.content") for other in group]
            other = next((problem for problem in own if known.get(problem, own[problem]) != own[problem]), None)
            if other is None and (alike or not own.keys().isdisjoint(known)):
                group.append(run)
                known |= own
                break
            if other is not None:
                said = (f"problem {other!r} has the answer {known[other]!r} in {first.folder} and {own[other]!r} in "
                        f"{run.folder}")
                if alike:
                    raise UserError(f"runs: {said}, though both say that their dataset is the same; allowed: records as a run "
                                    "wrote them")
                if file_of(run) == file_of(first):
                    versions.append(f"two versions of {run.component('dataset')} are here: {said}; they are separate datasets")
        else:
            groups.append([run])
            golds.append(own)
            notes += versions
    names, files = ([of(group[0]) for group in groups] for of in (lambda run: run.component("dataset"), file_of))
    names = [file if file and names.count(name) > 1 and files.count(file) == 1 else name
             for name, file in zip(names, files, strict=True)]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80] or "dataset" for name in names]
    again = [names[:index].count(name) for index, name in enumerate(names)]
    return [(f"{name}-{count + 1}" if count else name, labelled(group) if len(groups) > 1 else group)
            for name, count, group in zip(names, again, groups, strict=True)], notes


def studies_of(runs: Sequence[Run], baseline: str | None = None, pair: Sequence[str] | None = None,
               alphas: Sequence[float] = ()) -> tuple[list[Study], list[str]]:
    """A study of each dataset, and sentences about datasets. See `study_of` for the arguments; raises UserError as it does.

    With several datasets, `baseline` and `pair` hold where the dataset has such runs. They must name runs of at least one.
    """
    datasets, notes = by_dataset(runs)
    notes += [f"{run.label}: engine.audit=false: what its server says of its tokens was believed without a check"
              for run in runs if run.identity.get("engine.audit") is False]
    if len(datasets) == 1:
        return [study_of(datasets[0][1], baseline, pair, alphas, datasets[0][0])], notes

    def has(runs: Sequence[Run], asked: Sequence[str]) -> bool:
        return all(named(runs, name) for name in asked)

    for option, asked in (("--baseline", [baseline] if baseline else []), ("--pair", pair or [])):
        if not any(has(of, asked) for _, of in datasets):
            labels = dict.fromkeys(run.label for _, of in datasets for run in of)
            raise UserError(f"{option}: given {' '.join(asked)}, which no dataset has; allowed: "
                            + ", ".join(map(repr, list(labels)[:20])))
    return [study_of(of, baseline if baseline and has(of, [baseline]) else None, pair if has(of, pair or []) else None, alphas,
                     name) for name, of in datasets], notes


def side_by_side(studies: Sequence[Study]) -> Section:
    """Accuracy of every run on every dataset: a row for each label, a column for each dataset."""
    rows: dict[str, dict] = {}
    names = [study.dataset for study in studies]
    for study in studies:
        for run in study.runs:
            row = rows.setdefault(run.label, {"run": run.label})
            row |= {} if study.dataset in row else accuracy(run.records).columns(study.dataset)
    shown = [row | {name: number(row, name, "share") if name in row else "" for name in names} for row in rows.values()]
    columns = {"run": "run", **{name: (name, "") for name in names}}
    return Section("datasets", "All datasets", paragraphs(_TEXT),
                   [ReportTable("datasets", "Accuracy on each dataset", columns, shown, list(rows.values()))])


class Built(NamedTuple):
    """A written report."""

    folder: Path
    parts: list[ReportPart]
    """One; with several datasets, one that compares them and one for each."""
    studies: Sequence[Study] = ()
    """The runs from which the sections are computed, by dataset; none for a report of probes."""

    @property
    def page(self) -> Path:
        """The HTML page of the report."""
        return self.folder / "report.html"

    @property
    def overall(self) -> str:
        """The first table of the report as text for a terminal; with several datasets the first table of each part."""
        first = [(part.name, as_text(part.sections[0].tables[0])) for part in self.parts]
        return "\n\n".join(f"{name}\n{text}" if name else text for name, text in first)


def build(runs: Sequence[str | Path], out: Path | None = None, *, baseline: str | None = None,
          pair: Sequence[str] | None = None, lenient: bool = False, alphas: Sequence[float] = (),
          formats: Collection[str] = ()) -> Built:
    """Reads the runs and writes their report from their records. Removes an earlier report's files from the folder.

    If all runs are of probes, the report has the tables of the probes, from their summaries.

    Args:
        runs: run folders, experiment folders, or globs.
        out: folder to write to. None means `report` in the folder that contains all runs, usually their experiment's.
        baseline, pair, alphas: see `study_of`.
        lenient: skips corrupt files and corrupt lines, and lists them, instead of raising.
        formats: `pdf` for figures and `latex` for tables, beside PNG, SVG and CSV.

    Raises a one-line UserError.
    """
    folders, studies = run_folders(runs), list[Study]()
    _progress(f"reading {len(folders)} runs")
    of_probes = [entry.folder for entry in folders if "probe" in identity_if_readable(entry.folder)]
    probes = []  # those whose summary has tables, each a list of rows
    for one in of_probes:
        summary = object_if_readable(one / "summary.json")
        tables, names = summary.get("tables"), (summary.get("probe"), summary.get("condition"))
        if isinstance(tables, dict) and all(isinstance(name, str) for name in names) and all(
                isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in tables.values()):
            probes.append(ProbeRun(one, identity_if_readable(one), summary))
    if len(of_probes) == len(folders):
        left_out = [f"left out: {folder}: not a finished run of a probe" for folder in of_probes
                    if folder not in [run.folder for run in probes]]
        if not probes:
            raise UserError("; ".join(left_out))
        named_runs: dict[str, list[ProbeRun]] = {}
        for run in probes:
            named_runs.setdefault(run.summary["probe"], []).append(run)
        title = f"{_few([run.folder.parent.name for run in probes])}: {_counted(probes)} of probes"
        parts = [ReportPart("", f"Probes: {', '.join(named_runs)}.", left_out,
                            [_section_of_probe(name, of) for name, of in named_runs.items()])]
    else:
        known = {run.folder for run in probes}
        of_samples, left_out = read([entry._replace(named=entry.named and entry.folder not in known) for entry in folders],
                                    lenient)
        studies, notes = studies_of(of_samples, baseline, pair, alphas)
        studies = [study._replace(probes=probes) for study in studies]
        of_samples = [run for study in studies for run in study.runs]
        folders = [Found(run.folder, True) for run in of_samples]
        title = (f"{_few([run.experiment for run in of_samples])}: {_counted(of_samples)} on "
                 f"{_few([study.dataset for study in studies])}")
        parts = [_part(study) for study in studies]
        if len(studies) == 1:
            parts = [parts[0]._replace(name="", warnings=[*left_out, *notes, *parts[0].warnings])]
        else:
            size = f"{sum(len(run.records) for run in of_samples):,} samples of {len(studies)} datasets."
            parts = [ReportPart("", size, [*left_out, *notes], [side_by_side(studies)]), *map(_prefixed, parts)]
    folder = out or Path(os.path.commonpath([run.folder.parent.resolve() for run in folders])) / "report"
    write(folder, title, parts, formats)
    return Built(folder, parts, studies)


def _counted(runs: Sequence[object]) -> str:
    return f"{len(runs)} run{'s' * (len(runs) > 1)}"


def _few(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _part(study: Study) -> ReportPart:
    _progress(f"comparing {len(study.runs)} runs on {study.dataset}")
    sections = [section for section_of in _SECTIONS if (section := section_of(study)) is not None]
    problems = {problem for run in study.runs for problem in run.problems}
    counts = (f"{sum(len(run.records) for run in study.runs):,} samples of {len(problems):,} problems; runs are compared with "
              f"{study.baseline.label}.")
    return ReportPart(study.dataset, counts, study.warnings, sections, paired.verdict_of(study, sections))


def _prefixed(part: ReportPart) -> ReportPart:
    """The part with names of tables and figures that begin with that of its dataset."""
    start = f"fig_{part.name}_"
    return part._replace(sections=[section._replace(
        tables=[table._replace(name=f"{part.name}_{table.name}") for table in section.tables],
        drawings=[drawing._replace(name=start + drawing.name.removeprefix(start).removeprefix("fig_"))
                  for drawing in section.drawings]) for section in part.sections])


def _progress(text: str) -> None:
    """A line in a terminal, for who waits; logs have none."""
    if sys.stderr.isatty():
        tell(text)


def write(folder: Path, title: str, parts: list[ReportPart], formats: Collection[str] = ()) -> None:
    """Writes tables, figures, Markdown and the page. The page is written last: when it exists, every file it names exists.

    Raises UserError.
    """
    tables, figures = folder / "tables", folder / "figures"
    sections = [section for part in parts for section in part.sections]
    again, written = (folder / "report.html").is_file(), set[Path]()
    try:
        for part in (tables, figures):
            part.mkdir(parents=True, exist_ok=True)
        for table in (table for section in sections for table in section.tables):
            latex = {".tex": as_text(table, form="latex_booktabs")} if "latex" in formats else {}
            for ending, text in {".csv": csv_of(table.rows if table.data is None else table.data), **latex}.items():
                written.add(path := tables / f"{table.name}{ending}")
                write_atomically(path, _encoded(text))
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
        write_atomically(folder / "report.md", _encoded(markdown(title, parts)))
        write_atomically(folder / "report.html", _encoded(html(title, parts, figures)))
    except OSError as error:
        raise UserError(f"--out: cannot write to {folder}: {error.strerror or error}") from error


def _encoded(text: str) -> bytes:
    """A text in UTF-8. Half a character, which JSON can hold and UTF-8 cannot, becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _section_of_probe(probe: str, runs: list[ProbeRun]) -> Section:
    labels = labels_of([run.summary["condition"] for run in runs], [run.identity for run in runs],
                       [configuration_of(run.folder) for run in runs])
    identities = {label: run.identity for label, run in zip(labels, runs, strict=True)}
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.summary["tables"]):
        rows = [{RUN_COLUMN: label, **row} for label, run in zip(labels, runs, strict=True)
                for row in run.summary["tables"].get(name, [])]
        if rows:
            tables.append(table_of(f"{probe}_{name}", name.replace("_", " "), beside(probe, identities, name, rows)))
    text = paragraphs(_PROBES_TEXT.format(folders=", ".join(run.folder.name for run in runs)))
    text += cautions([run.summary.get("num_problems", 0) for run in runs])
    source = source_of(probe)
    return Section(probe, f"probe={probe}", text + (paragraphs(_PUBLISHED.format(source=source)) if source else []), tables)
