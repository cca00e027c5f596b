"""The report as HTML and as Markdown, from the same sections.

The page is one self-contained file; the Markdown refers to the figure files.
"""

from __future__ import annotations

import base64
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from dflash_mcmc.errors import one_line, printable
from dflash_mcmc.report.parts import Section, Table
from dflash_mcmc.report.study import Study

_TEMPLATE = Path(__file__).with_name("page.html.j2")


class Heading(NamedTuple):
    """The head of a report."""

    title: str
    counts: str
    """A sentence on the size of the data."""
    warnings: Sequence[str]
    """Notes to read before the comparison."""


def heading_of(study: Study) -> Heading:
    """The head of a report of samples."""
    return Heading(title_of(study), _counts(study), study.warnings)


def html(heading: Heading, sections: Sequence[Section], figures: Path) -> str:
    """The page as HTML. Its figures are embedded as SVG. The page loads nothing over a network.

    Args:
        figures: folder of the figure files.
    """
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=heading.title, counts=heading.counts, warnings=heading.warnings, sections=sections, version=_version(),
        picture=lambda name: "data:image/svg+xml;base64," + base64.b64encode((figures / f"{name}.svg").read_bytes()).decode())


def markdown(heading: Heading, sections: Sequence[Section]) -> str:
    """The report's text and tables as Markdown, with links to the figure files."""
    parts = [f"# {heading.title}", heading.counts, *(f"> **Note:** {_escaped(warning)}" for warning in heading.warnings)]
    for section in sections:
        parts += [f"## {section.title}", *map(_escaped, section.text)]
        parts += [f"![{drawing.title}](figures/{drawing.name}.png)" for drawing in section.drawings]
        for table in section.tables:
            parts += [f"**{_escaped(table.title)}**", text_of(table, _escaped)]
    return "\n\n".join(parts) + "\n"


def text_of(table: Table, cell: Callable[[str], str] = one_line) -> str:
    """A table for a terminal, or for Markdown if `cell` escapes the characters that Markdown interprets."""
    return tabulate([[cell(text) for text in row] for row in table.cells()], [cell(column.header) for column in table.columns],
                    tablefmt="github", disable_numparse=True,
                    colalign=["right" if column.number else "left" for column in table.columns] if table.rows else None)


def title_of(study: Study) -> str:
    """The page title: experiments, number of runs and dataset."""
    experiments = list(dict.fromkeys(run.experiment for run in study.runs))
    shown = ", ".join(experiments[:3]) + (f" and {len(experiments) - 3} more" if len(experiments) > 3 else "")
    return f"{shown}: {len(study.runs)} run{'s' * (len(study.runs) > 1)} on {study.dataset}"


def _counts(study: Study) -> str:
    records = sum(len(run.records) for run in study.runs)
    problems = len({problem for run in study.runs for problem in run.problems})
    return f"{records:,} samples of {problems:,} problems; runs are compared with {study.baseline.label}."


def _escaped(text: str) -> str:
    for sign in ("\\", "|", "*", "_", "<", "[", "`"):
        text = text.replace(sign, "\\" + sign)
    return printable(text.replace("\n", " "))


def _version() -> str:
    return importlib.metadata.version("dflash_mcmc")
